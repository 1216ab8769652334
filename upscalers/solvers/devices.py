"""The device that a solver computes on."""

from midus_hf.config.usable_device import usable_device
from upscalers.request.errors import RequestError


def check_device(device: str, precision: str = "float64") -> None:
    """Refuse a device that torch does not have here, or that cannot compute in a precision.

    Args:
        device: As torch names it.
        precision: A dtype's name.

    Raises:
        RequestError: With what there is.
    """
    try:
        usable_device(device, precision)
    except ValueError as error:
        raise RequestError(str(error)) from None


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
