"""One file per command, with the wiring of its parts.
May touch: everything but main."""
