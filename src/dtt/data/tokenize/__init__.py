"""Tokenization: tokenizers, encoding engines, and the token files that ranks write together."""
