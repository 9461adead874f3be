"""Inspection of text and token files before training: contents, mixture, training samples."""
