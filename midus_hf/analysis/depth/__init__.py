"""Measurements of what heads read of the depth."""
