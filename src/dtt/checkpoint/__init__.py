"""Training checkpoints, either complete on disk or absent; knows only state dicts and files."""
