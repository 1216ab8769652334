"""Choose which parameters are trained, in which groups, and at which rates."""
