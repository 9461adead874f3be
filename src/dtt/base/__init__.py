"""Errors, bounded reads, atomic files, logging, ranks and local processes.

Knows nothing of dtt's configuration or files."""
