"""Selections of corpora: filters, duplicates and contaminated documents; `dtt clean`."""
