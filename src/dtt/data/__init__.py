"""The data pipeline: documents to token files, and token files or text to training batches."""
