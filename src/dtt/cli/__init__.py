"""The command line, one module per group of commands: options and help texts.
May import: commands, config, runtime. Never torch, numpy or anything slow to import."""
