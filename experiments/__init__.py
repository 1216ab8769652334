"""Studies that were made once: scripts that are run by hand, and their results."""
