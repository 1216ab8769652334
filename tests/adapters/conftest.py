"""Checkpoints and texts of the training tests, for runs with adapters."""

from training.conftest import assigned, corpus, models, upscaled  # noqa: F401
