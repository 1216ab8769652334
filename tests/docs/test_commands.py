"""Commands that the pages show are commands: their names, options and keys exist."""

import ast
import dataclasses
import importlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from midus_hf.cli import upscale
from midus_hf.cli.entry_points import COMMANDS
from midus_hf.compare.options import Comparison
from midus_hf.training.arguments import TrainArguments
from midus_hf.training.sft.arguments import SftArguments

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
    *sorted((ROOT / "configs").rglob("*.yaml")),
]
KEYS: dict[str, Any] = {"train": TrainArguments, "sft": SftArguments}
COMMAND = re.compile(r"(?<![\w/.-])(?:midus|upscale) [^`\n]*")


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """Return the command that words name, and the words behind these."""
    program, *rest = words
    if program == "upscale":
        command = typer.main.get_command(upscale.app)
    else:
        if rest[0] not in COMMANDS:
            return None, rest
        command = typer.main.get_command(importlib.import_module(f"midus_hf.cli.{COMMANDS[rest[0]]}").app)
        rest = rest[1:]
    while rest and rest[0] in getattr(command, "commands", {}):
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


@cache
def text_of(page: Path) -> str:
    """Return a page, of a notebook its text and its cells as blocks, continued lines joined."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
        blocks = [f"```python\n{source}\n```\n" if kind == "code" else f"{source}\n" for kind, source in cells]
        text = re.sub(r"python\n%%bash", "sh", re.sub(r"%%capture\n", "", "\n".join(blocks)))
    return text.replace("\\\n", " ")


def commands_in(page: Path) -> list[str]:
    """Return the commands of a page's code blocks and inline code, or of a recipe's comments, continued lines joined."""
    text = text_of(page)
    if page.suffix == ".yaml":
        return [
            match.group() for match in COMMAND.finditer("\n".join(re.findall(r"^#(.*)$", text, flags=re.MULTILINE)))
        ]
    blocks = re.findall(r"^```(?:sh|console)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    inline = re.findall(
        r"`((?:midus|upscale) [^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    )
    shown = [line for line in (*lines, *inline) if re.match(r"(midus|upscale) ", line)]
    return [re.split(r"\s#\s|\s*\|\s|\s>\s", line)[0] for line in shown]


def mistakes(line: str) -> list[str]:
    """Return what a shown command names that does not exist."""
    words = [word.strip("[](),.;:") for word in line.split()]
    command, rest = command_of(words)
    if command is None:
        return [] if words[1].startswith(("--", "-h")) or words[1].isupper() else [f"no command {words[1]!r}"]
    if getattr(command, "commands", None) and rest and re.match(r"[a-z]", rest[0]):
        return [f"no command {rest[0]!r}"]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    if words[:2] in (["midus", "train"], ["midus", "sft"]):
        options |= {"--KEY", "--model", "--output", *(f"--{key.name}" for key in dataclasses.fields(KEYS[words[1]]))}
    results = []
    for word in rest:
        name = word.partition("=")[0]
        if word.startswith("--") and name not in {*options, "--help", "--version", "--"}:
            results += [part for part in name.split("|") if part not in options]
    for setting in re.findall(r"--set (\w+)", line) if words[:2] == ["midus", "compare"] else ():
        if setting not in {key.name for key in dataclasses.fields(Comparison)}:
            results.append(f"no key {setting!r}")
    return results


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_shows_exists(page):
    wrong = {line: names for line in commands_in(page) if (names := mistakes(line))}
    assert not wrong


def test_commands_are_found_at_all():
    assert sum(len(commands_in(page)) for page in PAGES) > 150


@pytest.mark.parametrize(
    ("line", "mistake"),
    [
        ("midus trian recipe.yaml", "no command 'trian'"),
        ("upscale stripe DIR --output DIR2", "no command 'stripe'"),
        ("midus look usage MODEL --signed", "--signed"),
        ("midus train recipe.yaml --models DIR", "--models"),
        ("midus compare compare.yaml --set bases=DIR", "no key 'bases'"),
        ("upscale --base DIR --methode moc", "--methode"),
    ],
)
def test_mistakes_are_noticed(line, mistake):
    assert mistakes(line) == [mistake]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.suffix != ".yaml"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_python_on_a_page_compiles_and_imports_names_that_exist(page):
    """Hold pieces of Python to the names of the packages; whole scripts are run by the tests of their pages."""
    for block in re.findall(r"^```python\n(.*?)^```", text_of(page), flags=re.DOTALL | re.MULTILINE):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("midus_hf", "upscalers"):
                module = importlib.import_module(node.module or "")
                absent = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert not absent, f"{node.module} has no {absent}"
