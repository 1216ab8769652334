"""Transformers' Trainer for memories."""
