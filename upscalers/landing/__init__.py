"""The output folder of a checkpoint, and what it may take the place of."""
