"""The report page of runs: data, curves, the HTML page, and the live server.
May import: launch, train, data, track, config, runtime."""
