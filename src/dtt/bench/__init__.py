"""Recipes of `dtt bench`: their files, their data, and the scores of their runs."""
