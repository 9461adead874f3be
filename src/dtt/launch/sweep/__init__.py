"""Sweeps: their trials, how these are run, and their results."""
