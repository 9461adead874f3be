"""Benchmark tasks: definitions, questions, scores and result files.
May import: data, model, optim, parallel, track."""
