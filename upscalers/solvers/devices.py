"""Checks of the device that a solver computes on, and of packages that solvers need."""

from midus_hf.config.usable_device import usable_device
from upscalers.request.errors import RequestError


def check_device(device: str, precision: str = "float64") -> None:
    """Refuse a device that torch does not have here, or that cannot compute in a precision.

    Args:
        device: Name of the device in torch, such as `"cuda:0"`.
        precision: Name of a dtype. Default: `"float64"`.

    Raises:
        RequestError: If the device cannot be used. The message lists the devices that can.
    """
    try:
        usable_device(device, precision)
    except ValueError as error:
        raise RequestError(str(error)) from None


def check_package(module: str, package: str, what: str, extra: str) -> None:
    """Check that a package is installed.

    Args:
        module: Name that the package is imported by.
        package: Name of the package for people.
        what: The feature that needs the package, as the subject of the message.
        extra: Extra of the midus-hf distribution that installs the package.

    Raises:
        RequestError: If the package is not installed.
    """
    import importlib.util

    if importlib.util.find_spec(module) is None:
        raise RequestError(f"{what} needs {package}, which is not installed. Run: pip install 'midus-hf[{extra}]'.")


def workers_on(device: str, workers: int | None) -> int | None:
    """Return how many solvers may run in parallel: `workers` if given, else 1 on an accelerator; None if there is no limit.

    Solvers on one accelerator would share its memory.
    """
    return 1 if workers is None and not device.startswith("cpu") else workers
