"""Inspection of text and token files before training: contents, mixture, training samples.
May touch: data, config, runtime, artifacts, errors."""
