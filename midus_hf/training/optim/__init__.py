"""Choose what trains, in which groups, at which rates."""
