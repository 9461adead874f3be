"""Estimates of a run's memory, communication and time by formulas, without building a model."""
