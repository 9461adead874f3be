"""Decoder-only transformer models and their families, for a single device."""
