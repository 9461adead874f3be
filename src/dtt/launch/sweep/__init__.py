"""Sweeps: their trials, how these are run, and their results.
May import: config, runtime, track."""
