"""Launchers, which run any dtt command line as local processes or as a Slurm job."""
