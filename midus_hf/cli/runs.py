"""What commands that start many runs have in common: how many beside one another, on which devices, and how they end."""

from typing import Annotated

import typer

from midus_hf.cli.command_line import FAILED, Ending

Jobs = Annotated[int, typer.Option(help="Runs beside one another, which share the processor's cores.", metavar="N")]
Devices = Annotated[
    str | None,
    typer.Option(
        help="GPUs, such as 0,1, one for each run beside the others.  [default: all, for one run]", metavar="LIST"
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be run, and what is done already.")]


def devices_of(given: str | None, jobs: int) -> list[str]:
    """The numbers of GPUs that `--devices` names.

    Args:
        given: Its words; None for none.
        jobs: How many runs are asked for beside one another.

    Raises:
        ValueError: If it names something else, or another number of devices than of jobs.
    """
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}; expected at least 1.")
    if given is None:
        return []
    numbers = [number.strip() for number in given.split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise ValueError(f"devices is {given!r}; expected numbers of GPUs, such as 0,1.")
    if jobs not in (1, len(numbers)):
        raise ValueError(
            f"jobs is {jobs}, and devices names {len(numbers)}; give devices alone, each of which has a run."
        )
    return numbers


def fail_for(failures: dict[str, str]) -> None:
    """End with the status of failed work where runs failed.

    Args:
        failures: Why, by their names.

    Raises:
        Ending: If there is one.
    """
    if failures:
        name, why = next(iter(failures.items()))
        words = f"one run failed, {name}" if len(failures) == 1 else f"{len(failures)} runs failed, the first {name}"
        raise Ending(FAILED, f"{words}: {why}. The same command does again what failed.")
