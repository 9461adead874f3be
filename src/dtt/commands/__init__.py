"""One file per command.
May touch:  wiring, in one run() each:everything but main."""
