"""Commands over `midus_hf`, which brings torch and transformers along: a package of their own, so that help comes at once.

Nothing here imports `midus_hf` before a command line has been read.
"""
