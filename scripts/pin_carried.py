"""Check of the code that checkpoints carry, in a process that cannot import this project: `scripts/pin.py --carried`.

Each checkpoint is loaded twice. As it was made, its logits must be the pinned ones bit for bit. After three steps of
training and with noise on all its tensors, they must be close to the logits that the package computes.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RTOL = ATOL = 1e-4


def carried(cases: Sequence[Any], cold: bool = False) -> dict[str, Any]:
    """Compare checkpoints, loaded by a process without the package, with what this process computes with the package.

    Args:
        cases: The cases to compare. Cases whose checkpoint carries no code are left out.
        cold: Whether to start with an empty cache of compiled code. Default: False.

    Returns:
        `rows`, for each case its name, seconds, the size of its code, `birth` (the digest of the logits of the
        untrained checkpoint), and the largest differences of the other logits from the package's, by name; None for
        differences within the tolerance.
    """
    from scripts.pin_models import scratch

    with tempfile.TemporaryDirectory(prefix="carried-", dir=scratch()) as temporary:
        folder = Path(temporary)
        prepared = [
            prepared for number, case in enumerate(cases) if (prepared := _prepared(case, folder / f"case_{number}"))
        ]
        (folder / "cases.json").write_text(json.dumps(prepared))
        environment = os.environ | {"HF_MODULES_CACHE": str(folder / "modules"), "PYTHONPATH": ""}
        environment |= {"MIDUS_NATIVE_CACHE": str(folder / "native")} if cold else {}
        command = [sys.executable, str(Path(__file__).resolve()), str(folder)]
        process = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
        if process.returncode:
            raise RuntimeError(f"{', '.join(each['case'] for each in prepared)}: {process.stderr[-2000:]}")
        findings = json.loads((folder / "found.json").read_text()) if prepared else []
        return {"rows": [each | sizes for each, sizes in zip(findings, prepared, strict=True)]}


def _prepared(case: Any, folder: Path) -> dict[str, Any] | None:
    """Write a checkpoint, its trained form and the package's results; return None if the checkpoint carries no code."""
    import torch

    from scripts import pin_models

    folder.mkdir()
    # Transformers names the package of remote code after the last folder.
    checkpoint = pin_models.made(case, folder).rename(folder.with_name(f"{folder.name}_birth"))
    code = [path.read_text().splitlines() for path in checkpoint.glob("*.py")]
    if not code:
        return None
    model = pin_models.loaded(checkpoint)
    pin_models.train(model, case, folder)
    trained = folder.with_name(f"{folder.name}_trained")
    model.save_pretrained(trained)
    _disturb(trained)
    model = pin_models.loaded(trained)
    arguments = pin_models.inputs(case)
    expected = {"logits": pin_models.logits(model, arguments), "generated": pin_models.generated(model, arguments)}
    torch.save((arguments, expected), folder.with_suffix(".pt"))
    (folder / "base").rename(folder.with_name(f"{folder.name}_base"))
    return {"case": str(case), "name": folder.name, "files": len(code), "lines": sum(map(len, code))}


def _disturb(folder: Path) -> None:
    """Add noise to all tensors of a checkpoint; for vectors, which may be gates or variances, the noise is positive."""
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(14)
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        for name, tensor in sorted(tensors.items()):
            if tensor.is_floating_point():
                noise = 0.1 * torch.randn(tensor.shape, generator=generator)
                tensors[name] = tensor + noise if tensor.dim() > 1 else tensor + noise.abs()
        save_file(tensors, path, {"format": "pt"})


class _Absent:
    """A finder that reports this project as not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in ("midus_hf", "upscalers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _without_the_package(folder: Path) -> None:
    """Load every checkpoint of a folder by the code that it carries, and write the results."""
    sys.meta_path.insert(0, _Absent())  # type: ignore[arg-type]
    import pin_models
    import torch

    pin_models.prepare()
    findings = []
    for prepared in json.loads((folder / "cases.json").read_text()):
        arguments, expected = torch.load(folder / f"{prepared['name']}.pt")
        seconds, models = {}, {}
        for kind, as_called in (("base", "base"), ("birth", "load")):
            started = time.perf_counter()
            models[kind] = pin_models.loaded(folder / f"{prepared['name']}_{kind}", trust_remote_code=True)
            seconds[as_called] = time.perf_counter() - started
        assert type(models["birth"]).__module__.startswith("transformers_modules.")
        started = time.perf_counter()
        birth = pin_models.digest_of(pin_models.logits(models["birth"], arguments))
        seconds["forward"] = time.perf_counter() - started
        trained = pin_models.loaded(folder / f"{prepared['name']}_trained", trust_remote_code=True)
        computed = {
            "logits": pin_models.logits(trained, arguments),
            "generated": pin_models.generated(trained, arguments),
        }
        differences = {name: _difference(computed[name], expected[name]) for name in expected}
        findings.append({"seconds": seconds, "birth": birth, "differences": differences})
    (folder / "found.json").write_text(json.dumps(findings))


def _difference(computed: Any, expected: Any) -> float | None:
    """Return the largest difference of two tensors; None if they are close enough."""
    import torch

    if torch.allclose(computed, expected, rtol=RTOL, atol=ATOL):
        return None
    return (computed - expected).abs().max().item()


if __name__ == "__main__":
    _without_the_package(Path(sys.argv[1]))
