"""The data pipeline: documents to token files, and token files or text to training batches.
May touch: config, runtime. numpy and pyarrow only; torch in loader.py alone."""
