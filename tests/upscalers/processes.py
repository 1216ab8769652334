"""Run Python and the `upscale` command in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_COMMAND = "import sys; from midus_hf.cli.upscale import main; sys.exit(main())"


def run_python(
    code: str, *arguments: Any, folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess:
    """Run `code` in a fresh interpreter.

    Args:
        code: The program.
        arguments: Its `sys.argv[1:]`.
        folder: Working directory.
        environment: Variables to set.
    """
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def run_upscale(*arguments: Any, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    """Run the `upscale` command in a fresh interpreter."""
    return run_python(_COMMAND, *arguments, folder=folder, **environment)
