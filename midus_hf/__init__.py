"""What a model upscaled by `upscalers` needs to run, to be trained and to be measured.

Importing this package registers every config and model with transformers' Auto classes.
"""

import gc

_collects = gc.isenabled()
gc.disable()  # what torch and transformers define stays: it is looked through for garbage once afterwards, not again and again
try:
    from midus_hf import memory, models
    from midus_hf.version import __version__
finally:
    if _collects:
        gc.enable()

__all__ = ["__version__", "memory", "models"]
