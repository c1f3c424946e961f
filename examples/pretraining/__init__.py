"""The data, model and training parts of the pre-training example."""
