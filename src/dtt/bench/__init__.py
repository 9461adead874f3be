"""Recipes of `dtt bench`: their files, their data, the scores of their runs, and their history.
May import: launch (local processes), evaluate (names of tasks), data, track, config, runtime."""
