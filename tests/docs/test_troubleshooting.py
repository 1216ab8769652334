"""Messages that the page on troubleshooting quotes are those of the code, word for word."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
PACKAGES = ("midus_hf", "upscalers")
QUOTED = [line for block in re.findall(r"```text\n(.*?)```", PAGE, flags=re.DOTALL) for line in block.splitlines()]
# Stands in a text of the code for what is filled in.
VARIES = "\0"


def template(node: ast.AST) -> str:
    """A string of the code, with `VARIES` for each part that is computed."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return VARIES


@cache
def templates() -> list[str]:
    """Every string of the packages."""
    results = []
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.JoinedStr, ast.Constant)):
                    results.append(template(node))
    return results


def says(text: str, quoted: str) -> bool:
    """Whether a message reads as quoted, where `...` is anything; it may go on behind the last `...`."""
    parts = [part.strip() for part in quoted.split("...")]
    if not all(part in text for part in parts):
        return False
    pattern = ".*?".join(re.escape(part) for part in parts)
    return re.match(rf"\W*{pattern}", text, flags=re.DOTALL) is not None


@pytest.mark.parametrize("quoted", QUOTED)
def test_the_code_says_it(quoted):
    assert any(says(text, quoted) for text in templates()), "no message of the code reads like that"
