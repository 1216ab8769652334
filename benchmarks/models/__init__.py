"""Whole models, base and upscaled, with random weights: memory, training steps, generation, prefill."""
