"""Where am I running? Ranks, devices, files that cannot tear, log lines, the job directory.
May touch: artifacts, errors. Knows no stage and no knob."""
