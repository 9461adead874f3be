"""Supervision of a run: attempts, stop requests, watchdog, time budget and goodput."""
