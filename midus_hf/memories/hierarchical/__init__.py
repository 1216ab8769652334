"""Hierarchical memories: blocks of parameters that a text fetches from a bank."""
