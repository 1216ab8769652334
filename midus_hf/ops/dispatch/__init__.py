"""Code that all ops share: the choice of a body, calls of registered ops, tiles of kernels, the library of compiled C."""
