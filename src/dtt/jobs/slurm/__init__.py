"""Slurm: job scripts, submissions and queries."""
