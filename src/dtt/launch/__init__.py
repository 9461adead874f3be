"""Launchers, which run any dtt command line as local processes or as a Slurm job.
May import: data, model (their facts, no torch), track, config, runtime."""
