"""Questions about a model with memories: what is used, losses without parts, what heads read."""
