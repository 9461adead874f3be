"""Roles to parameter groups, Muon, schedules. Knows parameters and roles, never the model.
May touch: config, runtime."""
