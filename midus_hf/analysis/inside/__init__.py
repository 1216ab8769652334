"""Measurements of what added parts do, and of how far predictions moved."""
