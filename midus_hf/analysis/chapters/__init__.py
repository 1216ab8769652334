"""Which chapters texts read, and what a model computes without a chapter."""
