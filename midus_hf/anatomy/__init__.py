"""What a model is, and what was added to it: model types and records of upscaling.

`types.py` and `record.py` are readable without torch.
"""
