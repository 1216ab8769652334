"""The model and tokenizer that a command lets read a text."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_on(
    name: str, dtype: str, device: str | None, what: str = "model"
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load a model, in eval mode, and its tokenizer; bars of libraries are shown on a terminal alone.

    Args:
        name: Folder or hub id.
        dtype: As in `load_model`.
        device: Where to. None: the first GPU, else the CPU.
        what: Whose name it is, for the error. Default: that of the model.

    Raises:
        ValueError: If the device cannot be used, or it cannot be loaded there, or its checkpoint lacks tensors.
    """
    import torch

    from midus_hf.config.usable_device import usable_device
    from midus_hf.library_bars import library_bars_on_terminals
    from midus_hf.saved_models import check_whole, load_model, load_tokenizer, refusing

    device = usable_device(device)
    unloaded = f"{what} is {name!r}, which cannot be loaded on {device}"
    with refusing(unloaded, OSError, RuntimeError), library_bars_on_terminals():
        tokenizer = load_tokenizer(name)
        model, missing = load_model(name, dtype)
        model.to(torch.device(device))  # type: ignore[arg-type]  # transformers' wrapper hides the argument
    check_whole(name, missing)
    return model.eval(), tokenizer
