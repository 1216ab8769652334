"""Chapters of a checkpoint's memory: listed, edited, taken out into files and put into other models."""
