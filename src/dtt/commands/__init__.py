"""Contains one module per command, which connects the parts that the command needs.
May touch: everything but main."""
