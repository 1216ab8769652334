"""Studies that were made once: each is a script, run by hand, and its results."""
