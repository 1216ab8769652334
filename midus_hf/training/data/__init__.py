"""Read what is trained on: texts, their tokens, how these are packed, and held-out text."""
