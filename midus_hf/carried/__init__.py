"""Writer of the one module of code that travels with a checkpoint, made from the sources of this package."""
