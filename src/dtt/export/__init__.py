"""Export of checkpoints to verified Hugging Face folders, and import of such folders.
May import: data, model, checkpoint."""
