"""Actions after a step besides training: a class each; `action_list.py` has their order."""
