"""The table of what was measured, as the text of a module."""

import json
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from midus_hf.ops import measured_tiles
from midus_hf.ops.measured_tiles import MEASURED
from midus_hf.ops.tiles import Changes

Measured = Mapping[str, Mapping[str, Mapping[tuple[Any, ...], Changes]]]
"""By device, kernel and shape, as in `measured_tiles`."""


def written(table: Path, device: str, timed: Mapping[tuple[str, tuple[Any, ...]], Changes]) -> None:
    """Write a table of what is known, and of what was timed in place of what was known of it.

    Args:
        table: The module. What it has is known; where it is not there, what kernels read is.
        device: Its name.
        timed: By kernel and shape what differs from the rule; nothing where the rule is best.
    """
    known: Measured = runpy.run_path(str(table))["MEASURED"] if table.is_file() else MEASURED
    measured = {name: {kernel: dict(shapes) for kernel, shapes in of.items()} for name, of in known.items()}
    of_device = measured.setdefault(device, {})
    for (kernel, shape), changes in timed.items():
        of_device.setdefault(kernel, {})[shape] = dict(changes)
    table.write_text(source(measured), encoding="utf-8")


def source(measured: Measured) -> str:
    """The module that holds what of `measured` differs from the rule."""
    lines = []
    for device, kernels in sorted(measured.items()):
        of_device = []
        for kernel, shapes in sorted(kernels.items()):
            changed = [
                f"            {shape}: {json.dumps(dict(changes))}," for shape, changes in shapes.items() if changes
            ]
            of_device += [f"        {json.dumps(kernel)}: {{", *changed, "        },"] if changed else []
        lines += [f"    {json.dumps(device)}: {{", *of_device, "    },"] if of_device else []
    before, name, after = Path(measured_tiles.__file__).read_text(encoding="utf-8").partition("] = {")
    tail = after[after.index('}\n"""') :]
    return before + name + ("\n" + "\n".join(lines) + "\n" if lines else "") + tail
