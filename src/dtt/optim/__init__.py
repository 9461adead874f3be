"""Optimizers, parameter groups, schedules. Knows parameters and their roles, never the model."""
