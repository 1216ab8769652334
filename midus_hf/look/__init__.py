"""Questions about a model with memories: what is used, what is lost without a part, how far predictions moved, what heads read."""
