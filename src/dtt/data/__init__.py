"""The data pipeline: documents to token files, and token files or text to training batches.

May import config and runtime. Depends on numpy and pyarrow; only loader.py imports torch.
"""
