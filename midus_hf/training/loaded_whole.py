"""Models whose parameters are whole while a run is prepared, though DeepSpeed's ZeRO-3 shall cut them."""

import contextlib
from collections.abc import Iterator

from transformers.integrations import deepspeed


@contextlib.contextmanager
def loaded_whole() -> Iterator[None]:
    """Load, or make, models of which each process has all; DeepSpeed cuts them when it takes them for training.

    Else transformers has ZeRO-3 cut parameters as a model is loaded, once `TrainingArguments` have been made, and what is asked
    of them before training, such as their dtype and how many there are, is asked of nothing.
    """
    before = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = before
