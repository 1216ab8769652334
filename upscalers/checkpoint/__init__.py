"""Checkpoints in folders, on the hub and in files, down to their bytes."""
