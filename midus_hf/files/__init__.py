"""Writing to disk: atomic, under locks, never over the user's files."""
