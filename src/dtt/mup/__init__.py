"""Checks of muP: coordinate check and learning-rate transfer."""
