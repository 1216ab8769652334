"""The device that a person asks for: whether PyTorch can compute on it here."""


def usable_device(name: str | None, precision: str = "float32") -> str:
    """The device to compute on, which is tried, so that what cannot be used is refused before anything is loaded.

    Args:
        name: As PyTorch names it. None: the first GPU, else the CPU.
        precision: Name of the dtype to compute in. Default: `"float32"`.

    Raises:
        ValueError: If PyTorch does not have it here, or it cannot compute so.
    """
    import torch

    device = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=device, dtype=getattr(torch, precision)).sum().item()
    except (RuntimeError, AssertionError, TypeError, ImportError) as error:
        available = "cpu, cuda" if torch.cuda.is_available() else "cpu"
        reason = str(error).splitlines()[0].partition(". ")[0][:120]
        raise ValueError(
            f"device is {device!r}, which cannot be used here ({reason}); expected one of: {available}."
        ) from None
    return device
