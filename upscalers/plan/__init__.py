"""Layer plans, placements of new layers, and the config that follows from a plan."""
