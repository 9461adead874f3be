"""The report page of runs: data, curves, the HTML page, and the live server."""
