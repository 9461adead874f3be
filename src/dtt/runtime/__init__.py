"""Runtime services: ranks, devices, atomic files, logging, and the job directory.
May import: artifacts, errors. Independent of stages and configuration."""
