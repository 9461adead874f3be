"""A checkpoint becomes a verified Hugging Face folder.
May touch: data, model, checkpoint."""
