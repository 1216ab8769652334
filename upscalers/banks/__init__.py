"""Edits of a checkpoint's banks: listing, deleting, exporting and importing blocks, and merging runs."""
