"""Print the newest version of Transformers that pip would install for this package; exit with 1 if no registry answers."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path


def newest_release() -> str | None:
    """Return the version, or None if no registry answers within a minute."""
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    requirement = next(each for each in project["dependencies"] if each.startswith("transformers"))
    options = ["--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--retries", "1", "--report", "-"]
    try:
        command = [sys.executable, "-m", "pip", "install", *options, requirement]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return json.loads(done.stdout)["install"][0]["metadata"]["version"]


if __name__ == "__main__":
    version = newest_release()
    print(version or "")
    raise SystemExit(version is None)
