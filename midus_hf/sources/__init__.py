"""Where models and texts come from: their names, checked; tokenizers; bars while they load."""
