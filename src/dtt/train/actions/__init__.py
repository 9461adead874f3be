"""Actions after a step besides training: a class each; `built_in.py` has their order."""
