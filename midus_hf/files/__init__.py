"""Writing to the disk: files and folders appear complete or not at all, under locks, and never replace what a person
put there.
"""
