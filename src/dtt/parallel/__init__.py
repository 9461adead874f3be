"""Parallelisation of a single-device model over many devices.
May import: config, runtime."""
