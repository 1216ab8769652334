"""Upscaled models in vLLM: greedy tokens compared with Transformers, and tokens per second compared with the base and LLaMA-Pro."""
