"""Training the same model under several optimizers, and what became of it."""
