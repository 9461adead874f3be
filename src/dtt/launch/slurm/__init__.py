"""Slurm: rendering of job scripts, submission, and queries.
May import: config, runtime."""
