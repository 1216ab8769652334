"""Weighted sums of table rows, and products with them."""
