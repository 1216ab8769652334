"""The command lines. No module imports torch or transformers before it has read its command line, so that help comes at once."""
