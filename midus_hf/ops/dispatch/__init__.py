"""Code that all ops share: the choice of an implementation, calls of registered ops, the library of compiled C."""
