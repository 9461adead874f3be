"""Manifests of the folders that steps hand to each other, and the paths of a job directory."""
