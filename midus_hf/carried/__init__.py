"""The one module of code that travels with a checkpoint: how it is made from the sources of this package."""
