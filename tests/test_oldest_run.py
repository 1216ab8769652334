"""What `make test-oldest` runs needs the core alone: extras are not installed there."""

import ast
import re
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parent.parent


def name_of(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9_.-]+", requirement).group().lower().replace("_", "-")


def test_tests_of_the_oldest_versions_import_no_extra():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    folders = re.findall(r"tests/\w+", re.search(r"^OLDEST_FILES = (.*)$", makefile, re.MULTILINE).group(1))
    installed = re.search(r"constraints-oldest.txt -e \. (.*)$", makefile, re.MULTILINE).group(1).split()
    assert folders == ["tests/ops", "tests/memory", "tests/models"] and "pytest" in installed
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    absent = {name_of(requirement) for extra in extras.values() for requirement in extra} - {
        *installed,
        "triton",
        "midus-hf",
    }
    assert {"peft", "datasets"} <= absent
    distributions = packages_distributions()
    for folder in folders:
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                names = [node.module] if isinstance(node, ast.ImportFrom) else []
                names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                for name in names:
                    result = {name_of(owner) for owner in distributions.get(name.split(".")[0], [])}
                    assert not result & absent, f"{file.relative_to(ROOT)} imports {name}"
