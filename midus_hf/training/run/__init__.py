"""A run of continual pretraining, from its options to its summary."""
