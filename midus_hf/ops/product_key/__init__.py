"""Product-key retrieval: the best of n * n slots by 2 * n sub-keys (MIDUS, equations 11 to 13)."""
