"""Export of checkpoints to verified Hugging Face folders, and import of such folders.
May touch: data, model, checkpoint."""
