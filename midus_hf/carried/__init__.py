"""Writer of the one module of code that travels with a checkpoint."""
