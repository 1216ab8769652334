"""What a model is, and what was added to it: model types and records of upscaling. Needs no torch."""
