"""Puts a single-device model on many devices, from outside.
May touch: config, runtime."""
