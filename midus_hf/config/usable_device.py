"""Choose the device to compute on, and test that PyTorch can use this device."""


def usable_device(name: str | None, precision: str = "float32") -> str:
    """Return the device to compute on, after a test that it works, so that a wrong device is refused before a model loads.

    Args:
        name: PyTorch's name of the device. None: the first GPU, or the CPU without a GPU.
        precision: Name of the dtype to compute in. Default: `"float32"`.

    Raises:
        ValueError: If PyTorch cannot use the device here, or the device cannot compute in this dtype.
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
