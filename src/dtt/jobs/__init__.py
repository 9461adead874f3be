"""Attempts, requests, state and listing of jobs, from their files and from Slurm."""
