"""Which chapters texts read, and what a model computes without one."""
