"""Data sources for training: token files of dtt and other programs, text tokenized on the fly.
May touch: the rest of data (not loader.py), config, runtime. numpy and pyarrow only."""
