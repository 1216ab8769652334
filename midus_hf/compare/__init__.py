"""Comparisons of methods: every run is a separate process that uses the functions of the other packages."""
