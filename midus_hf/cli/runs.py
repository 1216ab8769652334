"""Parts of commands that start many runs: how many runs at a time, on which devices, and how the command ends."""

from typing import Annotated

import typer

from midus_hf.cli.command_line import FAILED, Ending

Jobs = Annotated[int, typer.Option(help="Runs at a time; they share the processor's cores.", metavar="N")]
Devices = Annotated[
    str | None,
    typer.Option(
        help="GPUs such as 0,1, with one run at a time on each.  [default: all, for one run]", metavar="LIST"
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be run, and what is done already.")]


def devices_of(devices: str | None, jobs: int) -> list[str]:
    """Return the GPU numbers that `--devices` lists; an empty list without the option.

    Args:
        devices: Value of `--devices`, such as `"0,1"`; None if the option is absent.
        jobs: Number of runs at a time. 1 with several devices means one run per device.

    Raises:
        ValueError: If `devices` holds anything but numbers, `jobs` is less than 1, or `jobs` is above 1 and not the number
            of devices.
    """
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}; expected at least 1.")
    if devices is None:
        return []
    numbers = [number.strip() for number in devices.split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise ValueError(f"devices is {devices!r}; expected numbers of GPUs, such as 0,1.")
    if jobs not in (1, len(numbers)):
        raise ValueError(
            f"jobs is {jobs}, and devices names {len(numbers)}; expected one run per device. Leave jobs out."
        )
    return numbers


def fail_for(failures: dict[str, str]) -> None:
    """End the command with the status of failed work if runs failed.

    Args:
        failures: Reason of each failure, by the run's name.

    Raises:
        Ending: If there are failures.
    """
    if failures:
        name, why = next(iter(failures.items()))
        count = f"one run failed, {name}" if len(failures) == 1 else f"{len(failures)} runs failed, the first {name}"
        raise Ending(FAILED, f"{count}: {why}. The same command repeats what failed.")
