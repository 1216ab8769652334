"""Measure what added parts do, and how far predictions moved."""
