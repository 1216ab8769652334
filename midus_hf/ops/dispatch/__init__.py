"""What all ops share: the choice of an implementation, calls of registered ops, compiled C."""
