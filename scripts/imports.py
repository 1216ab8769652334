"""What each Python file of the repository imports; run, it prints the test files that depend on what changed since `main`.

    python scripts/imports.py [--base BRANCH]

A file depends on what it imports, also within functions, on `conftest.py` beside and above it, and on paths that are among its texts
(`"configs"`). Where only a run knows what is imported, it depends on all of its folder, and a test on everything.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Folders of Python files.
FOLDERS = ("midus_hf", "upscalers", "benchmarks", "demo", "docs", "experiments", "material", "scripts", "tests")
# A module in a program that a test runs elsewhere.
_IN_PROGRAM = re.compile(rf"(?:from|import|-m) ((?:{'|'.join(FOLDERS)})\b[\w.]*)")
_IMPORTING = ("import_module", "iter_modules", "run_module", "run_path", "walk_packages")


def module_of(file: Path) -> str:
    """Return the name by which other folders import a file of the repository."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def files_of(folder: str) -> list[Path]:
    """Return the Python files in a folder of the repository."""
    return sorted((ROOT / folder).rglob("*.py"))


@cache
def imports_of(file: Path) -> frozenset[str]:
    """Return the names that a file imports, also within functions and for types."""
    return frozenset(name for node in _nodes_of(file) for name in _imported(node))


@cache
def _nodes_of(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and node.module:
        yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)


@cache
def _modules() -> dict[str, Path]:
    """Files by the names of their modules; those of tests also by the names in their folder, from which tests import helpers."""
    modules = {module_of(file): file for folder in FOLDERS for file in files_of(folder)}
    return {name.removeprefix("tests."): file for name, file in modules.items()} | modules


@cache
def _texts_of(file: Path) -> frozenset[str]:
    return frozenset(
        node.value for node in _nodes_of(file) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


@cache
def _names_of(file: Path) -> frozenset[str]:
    return frozenset(node.id for node in _nodes_of(file) if isinstance(node, ast.Name))


def _is_of_tests(file: Path) -> bool:
    return file.is_relative_to(ROOT / "tests")


def _named_in_runs(file: Path) -> set[str] | None:
    """Return the modules that a file imports by a text; None where only a run knows them, or a test looks through the repository."""
    names = {name for text in _texts_of(file) if _is_of_tests(file) for name in _IN_PROGRAM.findall(text)}
    names |= {f"{name}.__main__" for name in names}
    assigned = {
        ast.unparse(node.targets[0]): node.value for node in _nodes_of(file)[0].body if isinstance(node, ast.Assign)
    }
    for node in (node for node in _nodes_of(file) if isinstance(node, ast.Call) and node.args):
        called = getattr(node.func, "attr", "")
        name = node.args[0]
        if called in _IMPORTING:
            name = assigned.get(ast.unparse(name), name)
            name = name.values[0] if isinstance(name, ast.JoinedStr) else name
            if not isinstance(name, ast.Constant) or (name.value.endswith(".") and name.value.startswith(FOLDERS)):
                return None
            names |= {name.value, f"{name.value}.__main__"}
        if called in ("glob", "rglob") and getattr(node.func.value, "id", "") == "ROOT" and _is_of_tests(file):
            return None
    return names


@cache
def _needs(file: Path, is_used: bool) -> frozenset[tuple[Path, bool]]:
    """Return the files that a file needs, each with whether it is used: a package is run for the modules in it, too."""
    modules = _modules()
    body = _nodes_of(file)[0].body
    named = imports_of(file) if is_used else {name for node in body for name in _imported(node)}
    if is_used and not any(getattr(node, "name", "") == "__getattr__" for node in body):
        in_runs = _named_in_runs(file)
        if in_runs is None:
            folder = ROOT if _is_of_tests(file) else file.parent
            return frozenset((other, True) for other in modules.values() if other.is_relative_to(folder)) | _found(
                named
            )
        named = named | in_runs
    return _found(named, is_used)


def _looks_through(test: Path) -> bool:
    """Whether a test depends on everything, itself or by a helper."""
    return reached_from(test) >= set(_modules().values())


def _found(names: Iterable[str], is_used: bool = True) -> frozenset[tuple[Path, bool]]:
    needs = set()
    for name in names:
        parts = name.split(".")
        prefixes = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
        known = [each for each in prefixes if each in _modules()]
        needs |= {(_modules()[each], is_used and each == known[-1]) for each in known}
    return frozenset(needs)


def reached_from(test: Path) -> set[Path]:
    """Return the files that a test file depends on: itself, each `conftest.py` above it, and what these import."""
    above = [folder / "conftest.py" for folder in test.parents if folder.is_relative_to(ROOT)]
    waiting = [(file, True) for file in (test, *above) if file.is_file()]
    seen = set(waiting)
    while waiting:
        new = _needs(*waiting.pop()) - seen
        seen |= new
        waiting += new
    return {file for file, _ in seen}


def test_files() -> list[Path]:
    """Return all test files."""
    return [file for file in files_of("tests") if file.name.startswith("test_")]


def tests_of(changed: Iterable[Path]) -> list[Path]:
    """Return the test files that depend on files. All do on a Python file that is gone, and on settings of the whole repository."""
    code = {file for file in changed if file.suffix == ".py"}
    others = {file.relative_to(ROOT) for file in changed} - {file.relative_to(ROOT) for file in code}
    if not all(file.is_file() for file in code) or any(
        file.parent == Path() and file.suffix != ".md" for file in others
    ):
        return test_files()
    # C and tables are read by modules beside them.
    code |= {module for file in others for module in (ROOT / file).parent.glob("*.py")}
    names = others | {file.relative_to(ROOT) for file in code}
    paths = {str(path) for file in names for path in (file, *file.parents)} - {"."}

    def depends(test: Path) -> bool:
        reached = reached_from(test)
        reading = (file for file in reached if _is_of_tests(file) and {"__file__", "ROOT"} & _names_of(file))
        return bool(reached & code or any(_texts_of(file) & paths for file in reading) or _looks_through(test))

    return [test for test in test_files() if code | others and depends(test)]


def changed_since(base: str) -> set[Path]:
    """Return the files that differ from the merge base with a branch, also those that git does not track yet."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    (start,) = git("merge-base", base, "HEAD")
    names = git("diff", "--name-only", "--no-renames", start) + git("ls-files", "--others", "--exclude-standard")
    return {ROOT / name for name in names}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print the test files that depend on what changed since a branch.")
    parser.add_argument("--base", default="main")
    parser.add_argument("--without", nargs="*", default=[], type=Path, help="test files that are left out")
    arguments = parser.parse_args()
    left_out = {file.resolve() for file in arguments.without}
    every = [file for file in test_files() if file not in left_out]
    selected = [file for file in tests_of(changed_since(arguments.base)) if file in every]
    print(
        f"{len(selected)} of {len(every)} test files depend on what changed since {arguments.base}.", file=sys.stderr
    )
    print(*(file.relative_to(ROOT) for file in selected))
