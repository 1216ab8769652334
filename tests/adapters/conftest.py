"""Checkpoints and texts of the training tests, for runs with adapters."""

from training.conftest import assigned, blocks_for, config_for, corpus, fetching, upscaled  # noqa: F401
