"""Weighted sums of table rows, and products of vectors with table rows."""
