"""The table of a model's parameters. Knows tensors and ranks, never the model."""
