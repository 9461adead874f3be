"""Checks of devices, disks and communication before a run."""
