"""What a model upscaled by `upscalers` needs to run, to be trained and to be measured.

Importing this package registers every config and model with transformers' Auto classes, and their types with PEFT.
"""

from midus_hf import memory, models
from midus_hf.peft_targets import register_targets
from midus_hf.version import __version__

register_targets()

__all__ = ["__version__", "memory", "models"]
