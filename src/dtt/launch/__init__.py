"""How a command line becomes processes. Wraps an argv and knows no stage.
May touch: data, model (their facts, no torch), track, config, runtime."""
