"""How a command line becomes processes. Wraps an argv and knows no stage.
May touch: config, runtime."""
