"""Benchmarks of single ops: every implementation is checked against a float64 reference, then timed against the others."""
