"""Generation and conversation with a model."""
