"""The loop, and what it needs to stop, resume and measure.
May touch: data, model, optim, parallel, checkpoint, track."""
