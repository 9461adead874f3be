"""Samples for training: token files or text, their mixture, shuffle and packing, and batches.
May import: config, runtime, data.corpus, data.tokenize. torch in loader.py alone."""
