"""Metric trackers: metrics.jsonl first, then the console, W&B and TensorBoard."""
