"""The value that marks missing targets, shared by the data, the model and parallelism."""

IGNORE_INDEX = -100
"""Target id that the loss ignores: the default `ignore_index` of PyTorch's cross-entropy."""
