"""From checkpoint to checkpoint: plan, recipes, streaming, provenance, verification.

Nothing here imports torch or transformers before it must, so that planning and help answer at once.
"""
