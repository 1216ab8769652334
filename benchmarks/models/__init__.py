"""Benchmarks of whole models with random weights, base and upscaled: memory, training steps, generation, prefill."""
