"""Upscaled models in vLLM: greedy tokens compared with Transformers, and tokens per second beside the base and LLaMA-Pro."""
