"""What a model upscaled by `upscalers` needs to run, to be trained and to be measured.

Importing this package registers every config and model with transformers' Auto classes.
"""

from midus_hf import memory, models
from midus_hf.version import __version__

__all__ = ["__version__", "memory", "models"]
