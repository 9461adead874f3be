"""Tokenizers and the engines that encode with them."""
