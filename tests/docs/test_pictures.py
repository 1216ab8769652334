"""The script draws the tracked pictures of methods, and every page of methods shows its picture."""

import re
from pathlib import Path

import matplotlib
import pytest

from docs.pictures.__main__ import main

DOCS = Path(__file__).parents[2] / "docs"
IMAGES = DOCS / "images"
PAGES = sorted(page for page in (DOCS / "methods").glob("*.md") if page.name not in ("README.md", "research.md"))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> dict[str, Path]:
    """Draw all pictures in a folder of the test, and return their files by name."""
    folder = tmp_path_factory.mktemp("pictures")
    main(["--output", str(folder)])
    return {file.name: file for file in folder.iterdir()}


def labels(picture: str) -> list[str]:
    """Return the texts of a picture; matplotlib writes each as a comment in front of the shapes of its letters."""
    return re.findall(r"<!-- (.+?) -->", picture, flags=re.DOTALL)


def test_every_tracked_picture_is_drawn_by_the_script(drawn):
    assert {file.name for file in IMAGES.glob("architecture-*.svg")} == set(drawn)


def test_tracked_pictures_are_what_the_script_draws(drawn):
    for name, file in drawn.items():
        tracked, new = (path.read_text(encoding="utf-8") for path in (IMAGES / name, file))
        if f"Matplotlib v{matplotlib.__version__}," in tracked:
            assert tracked == new, f"{name} is not what the script draws; run make pictures"
        else:  # another version may write other numbers
            assert labels(tracked) == labels(new) != [], f"{name} is not what the script draws; run make pictures"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_of_methods_describes_its_picture(page):
    text = page.read_text(encoding="utf-8")
    (description,) = re.findall(rf"^!\[(.+)\]\(\.\./images/architecture-{page.stem}\.svg\)$", text, flags=re.MULTILINE)
    assert len(description.split()) > 5
