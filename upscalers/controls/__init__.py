"""Controls of a memory that are made of a trained checkpoint."""
