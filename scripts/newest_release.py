"""Print the newest versions of packages, as `torch==2.14.1`, that pip would install here; exit with 1 if no registry answers."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path


def newest_releases(names: Iterable[str]) -> list[str] | None:
    """Return a requirement for each named dependency of this package; None if no registry answers within two minutes."""
    project = Path(__file__).parents[1] / "pyproject.toml"
    dependencies = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    by_name = {re.split(r"[<>=]", each)[0]: each for each in dependencies}
    options = ["--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--retries", "1", "--report", "-"]
    try:
        command = [sys.executable, "-m", "pip", "install", *options, *(by_name[name] for name in names)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    found = [each["metadata"] for each in json.loads(done.stdout)["install"]]
    # Builds of one release, such as +cpu and +cu130, are one version.
    return [f"{each['name']}=={each['version'].partition('+')[0]}" for each in found]


if __name__ == "__main__":
    releases = newest_releases(sys.argv[1:])
    print("\n".join(releases or ()))
    raise SystemExit(releases is None)
