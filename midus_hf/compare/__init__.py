"""Comparisons of methods: every run is a separate process that calls the commands of the other packages."""
