"""Inspection of text and token files before training: contents, mixture, training samples.
May import: data, config, runtime, artifacts, errors."""
