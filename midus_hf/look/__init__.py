"""Questions about a model with memories: what is used, the loss without a part, how far predictions moved, what heads read."""
