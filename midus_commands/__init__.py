"""The command lines: a package of their own, so that help comes at once and nothing else depends on them.

Nothing here imports `midus_hf`, which brings torch and transformers along, before a command line has been read.
"""
