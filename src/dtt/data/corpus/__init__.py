"""Corpora: downloading documents, reading them, and dividing them into units of work."""
