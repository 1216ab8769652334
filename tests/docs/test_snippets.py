"""Every block of the documentation that a reader can run is run by a test, or a mark says what running the block needs."""

import importlib
import re

import pytest

from tests.docs.snippets import ROOT, RUN_LANGUAGES, SHOWN_LANGUAGES, Block, blocks_of, pages, run_by

BLOCKS = [block for page in pages() for block in blocks_of(page)]


@pytest.fixture(scope="module")
def blocks_that_run() -> dict[Block, str]:
    """Return the blocks that test modules take when they are imported, and the module of each."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if re.search(
            r"^from tests\.docs\.snippets import .*\btake\b", path.read_text(encoding="utf-8"), flags=re.MULTILINE
        ):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    return run_by()


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in RUN_LANGUAGES], ids=str)
def test_a_block_is_run_or_marked(block, blocks_that_run):
    if block.is_marked:
        assert block not in blocks_that_run
    else:
        assert block in blocks_that_run, (
            f"no test runs {block}; give its page a session in tests/docs/test_sessions.py, or mark the block: "
            "<!-- not run: needs ... -->"
        )


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_names_its_language(block):
    assert block.language in (*RUN_LANGUAGES, *SHOWN_LANGUAGES)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.marks], ids=str)
def test_a_mark_says_what_is_needed_and_fits_the_block(block):
    for mark in block.marks:
        assert mark.reason.startswith("needs ")
        assert any(line.startswith(mark.beginning) for line in block.text.splitlines())
    assert block.is_marked or any(block.commands), "mark the whole block"


@pytest.mark.parametrize("page", pages())
def test_every_mark_stands_right_before_a_block(page):
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    marks = [line for line in lines if line.startswith("<!-- not run")]
    assert len(marks) == sum(len(block.marks) for block in blocks_of(page))
