"""The data pipeline: documents to token files, and token files or text to training batches.
May import: config, runtime. numpy and pyarrow only; torch in samples/loader.py alone."""
