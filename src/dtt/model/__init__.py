"""The decoder and its families.
May touch:  single-device code that knows of no process group:config, runtime."""
