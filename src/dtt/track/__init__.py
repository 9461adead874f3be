"""Where metrics go: metrics.jsonl first, then the console, W&B, TensorBoard.
May touch: config, runtime."""
