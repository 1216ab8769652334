"""Addresses of n-grams in tables of rows."""
