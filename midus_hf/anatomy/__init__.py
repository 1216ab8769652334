"""What a model is, and what was added to it: model types, records of upscaling, and views of loaded models.

`types.py` and `record.py` are readable without torch.
"""
