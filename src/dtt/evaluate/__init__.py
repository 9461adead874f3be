"""Evaluation of models: validation loss and samples."""
