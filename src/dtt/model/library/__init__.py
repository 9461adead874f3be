"""The family `transformers`: any causal model of that library, computed by the library's module."""
