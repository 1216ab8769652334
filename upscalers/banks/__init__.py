"""Edits of a checkpoint's banks: blocks listed, deleted, exported, imported, and runs merged."""
