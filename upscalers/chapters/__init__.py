"""Chapters of a checkpoint's memory: listing, editing, export to files and import into other models."""
