"""Evaluation of models: validation loss and samples.
May import: data, model, optim, parallel, track."""
