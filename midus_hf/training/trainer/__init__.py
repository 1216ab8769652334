"""Transformers' Trainer for models with memories."""
