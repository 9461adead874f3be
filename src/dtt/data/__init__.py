"""Documents in, token files out, batches back.
May touch: config, runtime. numpy and pyarrow only; torch in loader.py alone."""
