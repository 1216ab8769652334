"""The main job on a real checkpoint: upscale, train, evaluate, report. Not part of the distribution."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

BIN = Path(sys.executable).parent
CONFIGS = Path(__file__).parent.parent / "configs"


def run(*words: object) -> tuple[str, str]:
    """Run a command, print the command and its output, and return both; end the program if the command fails."""
    line = list(map(str, words))
    command = shlex.join(line)
    print(f"\n$ {command}", flush=True)
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="", flush=True)
    if done.returncode:
        sys.exit(f"demo: the command above failed with exit status {done.returncode}.")
    return command, done.stdout


def empty_folder(output: Path, default: Path) -> Path:
    """Return the folder of a demonstration's files, empty; what an earlier run left is removed from the default folder alone.

    The program ends if another folder holds files.
    """
    if output == default:
        shutil.rmtree(output, ignore_errors=True)
    elif output.exists() and (not output.is_dir() or any(output.iterdir())):
        sys.exit(f"demo: --output is {str(output)!r}, which holds files; expected a new or an empty folder.")
    output.mkdir(parents=True, exist_ok=True)
    return output
