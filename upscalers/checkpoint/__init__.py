"""Checkpoints as they lie in folders, on the hub and in files: what is read, byte by byte."""
