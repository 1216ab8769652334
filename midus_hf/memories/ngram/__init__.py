"""N-gram memory, as Engram has it."""
