"""The training loop and the objects that it calls.
May import: data, model, optim, parallel, checkpoint, track, evaluate."""
