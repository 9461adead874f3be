"""Conversations as training data: rows, chat templates, loss masks and their encoding.
May import: config, runtime, data.corpus, data.tokenize. No torch."""
