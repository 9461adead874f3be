"""Optimizers, parameter groups, schedules. Knows the table of parameters, never the model."""
