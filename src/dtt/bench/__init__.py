"""Recipes of `dtt bench`: their files, their data, the scores of their runs, and their history."""
