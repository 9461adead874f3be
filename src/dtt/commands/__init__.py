"""One module per command, which connects the parts that the command needs.
May import: everything but main."""
