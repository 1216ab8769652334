"""What checkpoints compute with the code that they carry, where this project cannot be imported: `scripts/pin.py --carried`.

Each checkpoint is loaded as it was made, where its logits have to be the pinned ones bit for bit, and as it is after three steps of
training and with noise on all its tensors, where they have to be close to what the package computes.
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
    """Compare checkpoints of cases, which are loaded by one process without the package; runs in a process that has it.

    Args:
        cases: Those whose checkpoint carries no code are left out.
        cold: Whether nothing is there that was compiled before.

    Returns:
        `rows`, for each case its name, seconds, the size of its code, `birth` (the digest of its logits then), and the largest
        differences of the other logits from those of the package, by name; None where they are close.
    """
    from scripts.pin_models import scratch

    with tempfile.TemporaryDirectory(prefix="carried-", dir=scratch()) as temporary:
        folder = Path(temporary)
        told = [told for number, case in enumerate(cases) if (told := _prepared(case, folder / f"case_{number}"))]
        (folder / "cases.json").write_text(json.dumps(told))
        environment = os.environ | {"HF_MODULES_CACHE": str(folder / "modules"), "PYTHONPATH": ""}
        environment |= {"MIDUS_NATIVE_CACHE": str(folder / "native")} if cold else {}
        command = [sys.executable, str(Path(__file__).resolve()), str(folder)]
        process = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
        if process.returncode:
            raise RuntimeError(f"{', '.join(each['case'] for each in told)}: {process.stderr[-2000:]}")
        found = json.loads((folder / "found.json").read_text()) if told else []
        return {"rows": [each | sizes for each, sizes in zip(found, told, strict=True)]}


def _prepared(case: Any, folder: Path) -> dict[str, Any] | None:
    """Write a checkpoint, its trained form and what the package computes with it; None where it carries no code."""
    import torch

    from scripts import pin_models

    folder.mkdir()
    # Transformers calls the package of remote code after the last folder.
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
    given = pin_models.inputs(case)
    expected = {"logits": pin_models.logits(model, given), "generated": pin_models.generated(model, given)}
    torch.save((given, expected), folder.with_suffix(".pt"))
    (folder / "base").rename(folder.with_name(f"{folder.name}_base"))
    return {"case": str(case), "name": folder.name, "files": len(code), "lines": sum(map(len, code))}


def _disturb(folder: Path) -> None:
    """Add noise to all tensors of a checkpoint; vectors, which may be gates or variances, stay positive or become so."""
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
    """A finder by which this project is not there."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in ("midus_hf", "upscalers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _without_the_package(folder: Path) -> None:
    """Load every checkpoint of a folder by the code that it carries, and write what comes out."""
    sys.meta_path.insert(0, _Absent())  # type: ignore[arg-type]
    import pin_models
    import torch

    pin_models.prepare()
    findings = []
    for told in json.loads((folder / "cases.json").read_text()):
        given, expected = torch.load(folder / f"{told['name']}.pt")
        seconds, models = {}, {}
        for kind, as_called in (("base", "base"), ("birth", "load")):
            started = time.perf_counter()
            models[kind] = pin_models.loaded(folder / f"{told['name']}_{kind}", trust_remote_code=True)
            seconds[as_called] = time.perf_counter() - started
        assert type(models["birth"]).__module__.startswith("transformers_modules.")
        started = time.perf_counter()
        birth = pin_models.digest_of(pin_models.logits(models["birth"], given))
        seconds["forward"] = time.perf_counter() - started
        trained = pin_models.loaded(folder / f"{told['name']}_trained", trust_remote_code=True)
        computed = {"logits": pin_models.logits(trained, given), "generated": pin_models.generated(trained, given)}
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
