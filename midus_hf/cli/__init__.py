"""The command lines. Nothing here imports torch or transformers before a command line has been read, so that help comes at once."""
