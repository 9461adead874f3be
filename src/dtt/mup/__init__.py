"""Checks of muP: coordinate check and learning-rate transfer.
May import: train, data, model, optim."""
