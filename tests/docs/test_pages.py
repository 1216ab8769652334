"""What pages show exists, and each block of code is run by a test, or says what it needs."""

import ast
import dataclasses
import importlib
import json
import re
from fnmatch import fnmatch
from functools import cache
from typing import Any

import pytest
import typer

from material.smollm2 import GGUF_NAME, GGUF_SHA256, PACKAGE
from midus_hf.cli import upscale
from midus_hf.cli.entry_points import COMMANDS
from midus_hf.compare.plan import Comparison
from midus_hf.config.errors import install_extra
from midus_hf.training.arguments import TrainArguments
from midus_hf.training.sft.run import SftArguments
from tests.docs.snippets import ROOT, RUN_LANGUAGES, SHOWN_LANGUAGES, TAKEN, blocks_in, blocks_of, pages
from upscalers.methods.contract import METHODS

BLOCKS = [block for page in pages() for block in blocks_of(page)]
FOUND = [ROOT.glob(pattern) for pattern in ("notebooks/*.ipynb", "configs/**/*.yaml")]
NOTEBOOKS, RECIPES = (sorted(str(path.relative_to(ROOT)) for path in paths) for paths in FOUND)
KEYS: dict[str, Any] = {"train": TrainArguments, "sft": SftArguments}
COMMAND = re.compile(r"(?<![\w/.-])(?:midus|upscale) [^`\n]*")
# What stands before a command of ours: a prompt, variables, and a launcher with its own options.
BEFORE = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S* )*(?:(?:accelerate launch|torchrun) .*-m midus_hf (?=train|sft))?")


@cache
def text_of(page: str) -> str:
    """Return a page, of a notebook its text and its cells as blocks, continued lines joined."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if page in NOTEBOOKS:
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
        blocks = [f"```python\n{source}\n```\n" if kind == "code" else f"{source}\n" for kind, source in cells]
        text = re.sub(r"python\n%%bash", "sh", re.sub(r"%%capture\n", "", "\n".join(blocks)))
    return text.replace("\\\n", " ")


def shell_of(page: str) -> str:
    return "".join(block.text for block in blocks_in(text_of(page), page) if block.language in ("sh", "console"))


def command_in(line: str) -> str:
    """Return the command of a line without what stands before it; of a launcher the command that it starts."""
    before = BEFORE.match(line)[0]  # type: ignore[index]
    return ("midus " if "-m midus_hf " in before else "") + line.removeprefix(before)


def commands_in(page: str) -> list[str]:
    text = text_of(page)
    if page in RECIPES:
        return COMMAND.findall("\n".join(re.findall(r"^#(.*)$", text, flags=re.MULTILINE)))
    lines = [command_in(line) for line in shell_of(page).splitlines()]
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    inline = re.findall(r"`((?:midus|upscale) [^`]+)`", outside)
    shown = [line for line in (*lines, *inline) if re.match(r"(midus|upscale) ", line)]
    return [re.split(r"\s#\s|\s*\|\s|\s>\s", line)[0] for line in shown]


def command_of(words: list[str]) -> tuple[Any, list[str]]:
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


def mistakes(line: str) -> list[str]:
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


def test_pages_and_recipes_show_what_exists():
    lines = {page: commands_in(page) for page in (*pages(), *NOTEBOOKS, *RECIPES)}
    assert sum(map(len, lines.values())) > 150
    assert [(page, line, wrong) for page in lines for line in lines[page] if (wrong := mistakes(line))] == []


@pytest.mark.parametrize(("line", "mistake"), [
    ("midus trian recipe.yaml", "no command 'trian'"),
    ("upscale stripe DIR --output DIR2", "no command 'stripe'"),
    ("midus look usage MODEL --signed", "--signed"),
    ("midus train recipe.yaml --models DIR", "--models"),
    ("midus compare compare.yaml --set bases=DIR", "no key 'bases'"),
    ("HF_TOKEN=... upscale --base BASE --methods packs", "--methods"),
    ("A=1 torchrun --nproc-per-node 8 -m midus_hf train RECIPE.yaml --model MODEL --outputs DIR", "--outputs"),
])  # fmt: skip
def test_mistakes_in_commands_are_noticed(line, mistake):
    assert mistakes(command_in(line)) == [mistake]


@pytest.mark.parametrize("page", [*pages(), *NOTEBOOKS])
def test_page_python_imports_names_that_exist(page):
    """Hold pieces of Python to the names of the packages; other tests run whole scripts."""
    pieces = [block.text for block in blocks_in(text_of(page), page) if block.language == "python"]
    for node in (node for piece in pieces for node in ast.walk(ast.parse(piece))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("midus_hf", "upscalers"):
            module = importlib.import_module(node.module or "")
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == [], node.module


def test_blocks_name_a_language_and_are_run_or_marked():
    assert {block.language for block in BLOCKS} <= {*RUN_LANGUAGES, *SHOWN_LANGUAGES}
    takes = re.compile(r"^from tests\.docs\.snippets import .*\btake\b", flags=re.MULTILINE)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if takes.search(path.read_text(encoding="utf-8")):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    runnable = [block for block in BLOCKS if block.language in RUN_LANGUAGES]
    wrong = [str(block) for block in runnable if block.is_marked == (block in TAKEN)]
    assert not wrong, "give its page a session in tests/docs/test_sessions.py, or mark it: <!-- not run: needs ... -->"


def test_marks_say_what_is_needed():
    for block in (block for block in BLOCKS if block.marks):
        for mark in block.marks:
            assert mark.reason.startswith("needs "), block
            assert any(line.startswith(mark.beginning) for line in block.text.splitlines()), block
        assert block.is_marked or any(block.commands), f"mark the whole block {block}"
    marks = {page: len(re.findall(r"^<!-- not run", text_of(page), flags=re.MULTILINE)) for page in pages()}
    read = {page: sum(len(block.marks) for block in blocks_of(page)) for page in pages()}
    assert marks == read, "a mark stands right before a block"


SOURCES = [file for folder in ("midus_hf", "upscalers", "scripts", "demo") for file in ROOT.glob(f"{folder}/**/*.py")]
FROM_A_REGISTRY = re.compile(
    r"(?:midus[-_]hf\[[a-z,]+\]|pip install [^.@]*midus[-_]hf)(?! @ git\+)(?!\[[a-z,]+\] @ git\+)"
)
# Commands that the README shows, and the extra that each needs.
NEEDED = {"midus train": "train", "midus eval": "eval", "midus cluster": "clusters", "midus look": "look"}
NEEDED |= {"python -m material": "material"}


def test_pages_install_from_a_clone_with_known_extras():
    code = [file.read_text() for file in SOURCES]
    shown = [text_of(page) for page in (*pages(), *NOTEBOOKS) if page.startswith(("README", "docs", "notebooks"))]
    assert [text for text in (*code, *shown) if FROM_A_REGISTRY.search(text)] == []
    extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M))
    named = {name for text in code for name in re.findall(r"install_extra\([\"'](\w+)[\"']\)", text)}
    assert named
    assert named <= extras
    assert install_extra("ot") == "in the clone of midus_hf, run: pip install -c constraints.txt -e '.[ot]'"


def test_readme_installs_what_it_uses():
    readme = text_of("README.md")
    (extras,) = re.findall(r"pip install -c constraints\.txt -e '\.\[([\w,]+)\]'", readme)
    use = readme.partition("## Use")[2].partition("## Methods")[0]
    assert {extra for command, extra in NEEDED.items() if command in use} == {*extras.split(",")}


def test_pages_say_what_needs_the_clone():
    """But that of benchmarks, which quotes commands of this repository throughout."""
    files_of_the_clone = re.compile(r"(configs|scripts)/|python -m (material|demo|benchmarks)")
    of_users = {"README.md", *(page for page in pages() if page.startswith("docs/"))} - {"docs/benchmarks.md"}
    needing = [page for page in of_users if files_of_the_clone.search(shell_of(page))]
    assert needing
    assert [page for page in needing if "root of the clone" not in text_of(page)] == []


def test_pages_name_the_model_of_their_figures():
    told = text_of("docs/benchmarks.md")
    assert [text for text in (f"`{PACKAGE.name}` {PACKAGE.version}", GGUF_NAME, GGUF_SHA256) if text not in told] == []
    bare = re.compile(r"SmolLM2-135M(?!-Instruct)")
    assert [page for page in (*pages(), *NOTEBOOKS) if bare.search(text_of(page))] == ["docs/benchmarks.md"]


def template(node: ast.AST) -> str:
    """A string of the code, with a zero byte for each part that is computed."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "\0"


def says(text: str, quoted: str) -> bool:
    """Whether a message reads as quoted, where `...` is anything; it may go on after the last `...`."""
    parts = [part.strip() for part in quoted.split("...")]
    pattern = ".*?".join(map(re.escape, parts))
    return all(part in text for part in parts) and bool(re.match(rf"\W*{pattern}", text, flags=re.DOTALL))


def test_troubleshooting_quotes_messages_of_the_code():
    nodes = (node for file in SOURCES for node in ast.walk(ast.parse(file.read_text())))
    strings = [template(node) for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant)]
    blocks = [block.text for block in blocks_of("docs/troubleshooting.md") if block.language == "text"]
    quoted = "".join(blocks).splitlines()
    assert quoted
    assert [line for line in quoted if not any(says(text, line) for text in strings)] == []


def test_peft_page_lists_methods_without_new_layers():
    (sentence,) = re.findall(r"Models without new layers \((.+?)\) take", text_of("docs/peft.md"))
    listed = re.findall(r"`([^`]+)`", sentence)
    attached = {
        name
        for name, method in METHODS.items()
        if not method.adds_layers and method.__module__.startswith("upscalers.")
    }
    assert {name for name in attached if not any(fnmatch(name, one) for one in listed)} == set()
    assert [one for one in listed if not any(fnmatch(name, one) for name in attached)] == []


def test_help_of_touched_names_each_method_whose_reads_it_finds():
    touched = command_of(["midus", "look", "touched"])[0]
    assert "engram" in touched.help
    assert "packs" in touched.help
