"""Estimates of a run's memory, communication and time by formulas, without building a model.
May touch: data, model, optim, parallel, as the rest of train."""
