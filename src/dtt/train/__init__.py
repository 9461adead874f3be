"""The training loop and the objects that it calls."""
