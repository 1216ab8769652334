"""Folders that appear whole or not at all, and what they may take the place of."""
