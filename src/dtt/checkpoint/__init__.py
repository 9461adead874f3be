"""Training states on disk that are whole or not there. Sees state dicts and files.
May touch: config, runtime."""
