"""Supervision of a run: its watchdog, lost ranks, and the times that other processes read."""
