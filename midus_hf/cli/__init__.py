"""The command lines. No module imports torch or transformers before it needs them, so that mistakes are reported at once."""
