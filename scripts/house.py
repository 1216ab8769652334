"""Measure the size of this repository, and of the code that a checkpoint carries.

    python scripts/house.py                                      a table
    python scripts/house.py --json                               the same as JSON, with the names behind each count
    python scripts/house.py --against scripts/house-before.json  two columns: that file's numbers, and today's

All lines of tracked Python files count, including blank lines and comments, except `scripts/house.py` and `scripts/pin*.py`.
"""

import argparse
import ast
import itertools
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Scripts that are not measured, since they will be deleted when the work that they measure is done.
OWN = tuple(f"scripts/{name}.py" for name in ("house", "pin", "pin_cases", "pin_models", "pin_carried"))

LARGEST_ROOM, SMALL_FILE, RUN = 18, 60, 6
# Goals by measure. In addition, no checkpoint of a method that is not listed shall carry more than 2,500 lines.
GOALS = {
    "lines of installed packages": "at most 42,000",
    "lines of all source": "at most 50,000",
    "lines of tests": "at most 45,000",
    f"rooms with more than {LARGEST_ROOM} files": "0",
    f"files of {SMALL_FILE} lines or fewer with one importer": "0",
    "carried lines: midus-hml": "at most 1,500",
    "carried lines: moc": "at most 1,200",
    "carried lines: moda": "at most 1,200",
}


def tracked(*patterns: str) -> list[str]:
    """Return the tracked files that match the patterns and exist, as paths from the root."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in listing.stdout.split("\0") if name and name not in OWN and (ROOT / name).is_file()]


def text(name: str) -> str:
    """Return the text of a file."""
    return (ROOT / name).read_text(encoding="utf-8")


def lines_of(names: Iterable[str]) -> int:
    """Return the number of lines of all files together."""
    return sum(len(text(name).splitlines()) for name in names)


def installed(names: Iterable[str]) -> list[str]:
    """Return the files that a wheel installs: files of the packages that `pyproject.toml` lists."""
    project = tomllib.loads(text("pyproject.toml"))
    patterns = project["tool"]["setuptools"]["packages"]["find"]["include"]
    return [name for name in names if any(fnmatch(PurePosixPath(name).parts[0], pattern) for pattern in patterns)]


def rooms(names: Iterable[str]) -> dict[str, int]:
    """Return the number of files per folder, for folders with more than `LARGEST_ROOM` files, the largest first."""
    counts = Counter(str(PurePosixPath(name).parent) for name in names)
    return {room: count for room, count in counts.most_common() if count > LARGEST_ROOM}


def module_of(name: str) -> str:
    """Return the name by which a file is imported."""
    parts = PurePosixPath(name).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(name: str, modules: dict[str, str]) -> Iterator[str]:
    """Yield the files that a file imports, anywhere in its code.

    Args:
        name: Path of the file from the root.
        modules: Files by the name by which they are imported.
    """
    package = module_of(name).split(".")
    package = package if name.endswith("__init__.py") else package[:-1]
    for node in ast.walk(ast.parse(text(name))):
        if isinstance(node, ast.Import):
            yield from (modules[alias.name] for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                imported = modules.get(f"{source}.{alias.name}") or modules.get(source)
                if imported:
                    yield imported


def small_files(names: list[str]) -> dict[str, str]:
    """Return the small files that exactly one other file imports, each with its importer."""
    modules = {module_of(name): name for name in names}
    importers: dict[str, set[str]] = defaultdict(set)
    for name in names:
        for imported in imports_of(name, modules):
            importers[imported].add(name)
    importer_of = {}
    for name in names:
        others = importers[name] - {name}
        if len(others) == 1 and not name.endswith(("__init__.py", "__main__.py")) and lines_of([name]) <= SMALL_FILE:
            importer_of[name] = others.pop()
    return importer_of


def repeated(names: Iterable[str]) -> list[str]:
    """Return pairs of places in two files with six or more equal lines, each as `file:line file:line lines`.

    Indentation and blank lines do not count, nor do lines of import statements and lines without a letter.
    """
    code = {name: list(_code(name)) for name in names}
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for name, lines in code.items():
        for start in range(len(lines) - RUN + 1):
            places[tuple(line for _, line in lines[start : start + RUN])].append((name, start))
    equal = {
        pair
        for equal_places in places.values()
        for pair in itertools.combinations(equal_places, 2)
        if pair[0][0] != pair[1][0]  # only pairs of different files
    }
    runs = []
    for (first, start), (second, other) in sorted(equal):
        if ((first, start - 1), (second, other - 1)) not in equal:  # a run of equal lines begins here
            length = RUN
            while ((first, start + length - RUN + 1), (second, other + length - RUN + 1)) in equal:
                length += 1
            runs.append(f"{first}:{code[first][start][0]} {second}:{code[second][other][0]} {length} lines")
    return runs


def _code(name: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line of a file that may count as repeated."""
    imports: set[int] = set()
    for node in ast.walk(ast.parse(text(name))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for number, line in enumerate(text(name).splitlines(), 1):
        if number not in imports and any(letter.isalpha() for letter in line):
            yield number, line.strip()


def carried() -> dict[str, tuple[int, int]]:
    """Return files and lines of code in the checkpoint that each method makes of a tiny Llama by default."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    from tiny import save_tiny_model
    from transformers import logging

    from scripts.pin_cases import METHODS
    from upscalers.runs.upscale import upscale

    logging.disable_progress_bar()
    sizes = {}
    with tempfile.TemporaryDirectory(prefix="house-") as temporary:
        base = save_tiny_model("llama", Path(temporary, "base"))
        for method in METHODS:
            options = METHODS[method] if method == "slices" else {}  # slices has no defaults
            output = Path(temporary, method)
            upscale(base=base, method=method, output=output, options=options, verify=False)
            sources = [path.read_text() for path in output.glob("*.py")]
            sizes[method] = len(sources), sum(len(source.splitlines()) for source in sources)
    return sizes


def measured() -> dict[str, Any]:
    """Return the numbers by measure, and the names behind some of them."""
    every = tracked("*.py")
    source = [name for name in every if not name.startswith("tests/")]
    packages, tests = installed(source), [name for name in every if name.startswith("tests/")]
    other = installed(tracked("*.c", "*.h", "*.jinja", "*.j2", "*.html", "*.css"))
    many, small, runs = rooms(source), small_files(source), repeated(source)
    code = {method: sizes for method, sizes in carried().items() if sizes[0]}
    by_package = Counter(dict.fromkeys({PurePosixPath(name).parts[0] for name in source}, 0))
    for name in source:
        by_package[PurePosixPath(name).parts[0]] += lines_of([name])
    numbers = {
        "lines of installed packages": lines_of(packages),
        "files of installed packages": len(packages),
        "lines of C, templates and pages in them": lines_of(other),
        "lines of all source": lines_of(source),
        "files of all source": len(source),
        **{f"lines of {name}": count for name, count in by_package.most_common()},
        "lines of tests": lines_of(tests),
        "files of tests": len(tests),
        f"rooms with more than {LARGEST_ROOM} files": len(many),
        f"files of {SMALL_FILE} lines or fewer": sum(lines_of([name]) <= SMALL_FILE for name in source),
        f"files of {SMALL_FILE} lines or fewer with one importer": len(small),
        f"pairs of {RUN} or more equal lines in two files": len(runs),
        **{f"carried lines: {method}": lines for method, (_, lines) in code.items()},
        **{f"carried files: {method}": files for method, (files, _) in code.items()},
    }
    return {"numbers": numbers, "rooms": many, "small files": small, "equal lines": runs}


def print_table(now: dict[str, Any], before: dict[str, Any] | None) -> None:
    """Print a row per measure: the earlier number, if known, the number now, and the goal."""
    names = list(now["numbers"]) + [name for name in (before or now)["numbers"] if name not in now["numbers"]]
    width = max(map(len, names))
    print(f"{'':{width}}  {'before  ' if before else ''}{'now':>6}  goal")
    for name in names:
        earlier = f"{before['numbers'].get(name, '-'):>6}  " if before else ""
        print(f"{name:{width}}  {earlier}{now['numbers'].get(name, '-'):>6}  {GOALS.get(name, '')}".rstrip())
    print("\nrooms:", ", ".join(f"{room} {count}" for room, count in now["rooms"].items()) or "none")
    print("\nsmall files with one importer:")
    for name, importer in now["small files"].items():
        print(f"  {name} <- {importer}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON, with the names behind each count")
    parser.add_argument("--against", type=Path, metavar="FILE", help="what --json printed earlier, as a column more")
    options = parser.parse_args()
    now = measured()
    if options.json:
        print(json.dumps(now, indent=1))
    else:
        print_table(now, json.loads(options.against.read_text()) if options.against else None)


if __name__ == "__main__":
    main()
