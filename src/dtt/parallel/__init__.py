"""Parallelisation of a single-device model over many devices."""
