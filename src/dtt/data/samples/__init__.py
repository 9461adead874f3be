"""Samples for training: token files or text, their mixture, shuffle and packing, and batches."""
