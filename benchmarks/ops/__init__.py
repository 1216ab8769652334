"""Ops alone: every implementation against a float64 reference first, then against each other."""
