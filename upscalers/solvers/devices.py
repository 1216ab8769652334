"""The device that a solver computes on."""

from upscalers.request.errors import RequestError


def check_device(device: str, precision: str = "float64") -> None:
    """Refuse a device that torch does not have here, or that cannot compute in a precision.

    Args:
        device: As torch names it.
        precision: A dtype's name.

    Raises:
        RequestError: With what there is.
    """
    import torch

    try:
        torch.zeros(1, device=device, dtype=getattr(torch, precision)).sum().item()
    except (RuntimeError, AssertionError, TypeError, ImportError) as error:
        available = "cpu, cuda" if torch.cuda.is_available() else "cpu"
        reason = str(error).splitlines()[0].partition(". ")[0][:120]
        raise RequestError(
            f"device is {device!r}, which cannot be used here ({reason}); expected one of: {available}."
        ) from None


def check_package(module: str, package: str, what: str, extra: str) -> None:
    """Refuse to go on without a package.

    Args:
        module: What is imported.
        package: Its name for people.
        what: What needs it.
        extra: The extra of this distribution that brings it.

    Raises:
        RequestError: If it is not installed.
    """
    import importlib.util

    if importlib.util.find_spec(module) is None:
        raise RequestError(f"{what} needs {package}, which is not installed. Run: pip install 'midus-hf[{extra}]'.")


def workers_on(device: str, workers: int | None) -> int | None:
    """Most solvers that may work at once: what a person said, else one on an accelerator, whose memory they would share."""
    return 1 if workers is None and not device.startswith("cpu") else workers
