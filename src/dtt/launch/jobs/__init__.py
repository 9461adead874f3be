"""The state of jobs, derived from their files and from Slurm.
May import: config, runtime."""
