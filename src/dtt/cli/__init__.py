"""The command line, one module per group of commands: options and help texts."""
