"""Conversations as training data: rows, chat templates, loss masks and their encoding."""
