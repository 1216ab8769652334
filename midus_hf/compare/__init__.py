"""Comparisons of methods; every run is a separate process."""
