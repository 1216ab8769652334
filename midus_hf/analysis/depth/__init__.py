"""Measure what heads read of the depth."""
