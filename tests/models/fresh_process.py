"""Run Python in a process of its own, where this project can be made impossible to import."""

import os
import subprocess
import sys
from pathlib import Path

_BLOCK_IMPORTS = """
import sys

class _Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("midus_config", "midus_hf", "upscalers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, _Absent())
"""

_SETTINGS = """
import torch
torch.set_num_threads(1)
"""


def run_python(code: str, folder: Path, *, package_present: bool) -> str:
    """Run `code` with `folder` as working directory and as transformers' cache of remote code.

    Returns:
        What it printed.
    """
    program = ("" if package_present else _BLOCK_IMPORTS) + _SETTINGS + code
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=folder,
        env={**os.environ, "HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
