"""Choose what trains, in which parameter groups, and at which rates."""
