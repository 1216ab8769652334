"""Run Python in a process of its own, where this project can be made impossible to import."""

from pathlib import Path

import torch
from processes.warm import run_warm

# Makes this project absent from a process, also where it is installed.
BLOCK_IMPORTS = """
import sys

class _Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("midus_hf", "upscalers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, _Absent())
"""
# Where remote code goes: transformers has read its variable already.
_SETTINGS = """
import os
import sys
import warnings
import torch
import transformers.dynamic_module_utils

warnings.simplefilter("ignore")
transformers.dynamic_module_utils.HF_MODULES_CACHE = os.environ["HF_MODULES_CACHE"]
"""


def run_python(code: str, folder: Path, *, package_present: bool) -> str:
    """Return what code prints in a folder, transformers' cache of remote code too."""
    threads = f"torch.set_num_threads({torch.get_num_threads()})\n"
    program = ("" if package_present else BLOCK_IMPORTS) + _SETTINGS + threads + code
    result = run_warm(program, folder=folder, HF_MODULES_CACHE=str(folder / "modules"))
    assert result.returncode == 0, result.stderr
    return result.stdout
