"""The training loop, and what it needs to stop, resume, evaluate and measure.
May touch: data, model, optim, parallel, checkpoint, track."""
