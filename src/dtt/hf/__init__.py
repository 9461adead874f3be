"""Hugging Face folders: verified exports, imports, and chat formats."""
