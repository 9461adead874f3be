"""What a run will take, in formulas: memory, communication, time. Nothing is built or measured.
May touch: data, model, optim, parallel, as the rest of train."""
