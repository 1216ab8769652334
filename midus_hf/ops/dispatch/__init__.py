"""Code that all ops share: the choice of a body, calls of registered ops, the library of compiled C."""
