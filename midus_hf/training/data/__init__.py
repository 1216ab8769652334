"""Read what a run trains on: texts, their tokens, how tokens are packed into sequences, and held-out text."""
