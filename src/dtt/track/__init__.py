"""Where metrics go.
May touch:  metrics.jsonl first, then the console, W&B, TensorBoard:config, runtime."""
