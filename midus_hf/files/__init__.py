"""Writing to the disk: files and folders appear complete or not at all, under locks, and never replace a person's files."""
