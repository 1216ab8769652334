"""Edits of checkpoints' memories: chapters, banks, glossaries, and shuffled rows."""
