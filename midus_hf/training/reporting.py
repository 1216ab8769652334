"""Where the log goes beside its file: the trackers that transformers' Trainer knows."""

from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)


def check_reporting(report_to: str | list[str]) -> None:
    """See that every tracker is known and installed.

    Args:
        report_to: As in `RunOptions`.

    Raises:
        ValueError: If one is not.
    """
    names = [report_to] if isinstance(report_to, str) else report_to
    if names == ["none"]:
        return
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
            raise ValueError(f"report_to is {report_to!r}; expected none, or one or more of {known}.")
        if name not in get_available_reporting_integrations():
            raise ValueError(
                f"report_to is {name!r}, which is not installed; pip install {name}, or set report_to: none."
            )
