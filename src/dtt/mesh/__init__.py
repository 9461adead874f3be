"""Devices, process groups, sharding and collectives, and how a process ends."""
