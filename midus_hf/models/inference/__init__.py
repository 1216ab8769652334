"""The parts of types that Transformers builds, read from a tiny model, and the proof that memory works in them."""
