"""The sources that training reads: token files of dtt and of others, text tokenized on the way.
May touch: the rest of data (not loader.py), config, runtime. numpy and pyarrow only."""
