"""N-gram memory, as in Engram."""
