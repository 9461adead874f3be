"""Losses that a run may minimise, and what computes them in a step."""
