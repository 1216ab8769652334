"""Writing to disk: files and folders are written atomically, under locks, and never replace the user's files."""
