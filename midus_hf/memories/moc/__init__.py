"""Mixture of Chapters: cross-attention to chapters of a bank that a router opens."""
