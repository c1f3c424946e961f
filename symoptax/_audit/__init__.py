"""Is each claimed symmetry true of a model and loss: the parts of `symoptax.audit`."""
