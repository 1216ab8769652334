"""Write the table of measured tiles: what is known, and what was timed in place of what was known."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from midus_hf.ops.dispatch.tiles import MEASURED, Changes, Measured, measured_tiles


def written(table: Path, device: str, timed: Mapping[tuple[str, tuple[Any, ...]], Changes]) -> None:
    """Write a table of what is known, and of what was timed in place of what was known of it.

    Args:
        table: The file. What it has is known; where it is not there, what kernels read is.
        device: Its name.
        timed: By kernel and shape what differs from the rule; nothing where the rule is best.
    """
    known = measured_tiles(table) if table.is_file() else MEASURED
    measured = {name: {kernel: dict(shapes) for kernel, shapes in of.items()} for name, of in known.items()}
    of_device = measured.setdefault(device, {})
    for (kernel, shape), changes in timed.items():
        of_device.setdefault(kernel, {})[shape] = dict(changes)
    table.write_text(source(measured), encoding="utf-8")


def source(measured: Measured) -> str:
    """Return the text of the file that holds what of `measured` differs from the rule, a line for each shape."""
    devices = []
    for device, kernels in sorted(measured.items()):
        of_device = []
        for kernel, shapes in sorted(kernels.items()):
            changed = [
                f"   {json.dumps({'shape': shape, 'changes': dict(changes)})}"
                for shape, changes in shapes.items()
                if changes
            ]
            of_device += [f"  {json.dumps(kernel)}: [\n" + ",\n".join(changed) + "\n  ]"] if changed else []
        devices += [f" {json.dumps(device)}: {{\n" + ",\n".join(of_device) + "\n }"] if of_device else []
    return ("{\n" + ",\n".join(devices) + "\n}" if devices else "{}") + "\n"
