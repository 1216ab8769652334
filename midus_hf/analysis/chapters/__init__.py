"""Count which chapters texts read, and measure what a model computes without one."""
