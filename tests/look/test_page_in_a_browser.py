"""Pages of answers in a real browser, headless: they are drawn, they scroll to their end, and they load nothing from elsewhere."""

import re
import shutil
import subprocess

import pytest

from midus_hf.look.page import Answer, TableOfWords

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=800,1600"),
)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")


def draw(axes):
    axes.plot([0, 1], [0, 1], color="#00ff00", linewidth=8)


@pytest.fixture
def page(tmp_path):
    pytest.importorskip("matplotlib")
    answer = Answer(
        title="What <slots> do",
        summary="A model read a text.",
        report={},
        tables=[TableOfWords("Slots", ["slot", "share"], [["3", "25.0%"]]), TableOfWords("Empty", ["slot"], [])],
        panels={"A green line": draw},
    )
    joined = Answer(title="All of it", summary="On a text.", report={}, tables=[], sections=[answer, answer])
    joined.write(tmp_path / "page.html")
    return tmp_path / "page.html"


def browse(page, *options) -> str:
    """Run the browser on a page, and return what it prints."""
    words = [BROWSER, *FLAGS, f"--user-data-dir={page.parent / 'profile'}", *options, page.as_uri()]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout


def test_a_browser_reads_the_sections_in_order(page):
    dom = browse(page, "--dump-dom")
    headings = re.findall(r"<h[123]>(.*?)</h[123]>", dom)
    section = ["What &lt;slots&gt; do", "Slots", "Picture"]
    assert headings == ["All of it", *section, *section]
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", dom), "the page needs no other file"


def test_a_browser_draws_tables_and_pictures(page):
    image = pytest.importorskip("PIL.Image")
    browse(page, f"--screenshot={page.with_suffix('.png')}")
    pixels = image.open(page.with_suffix(".png")).convert("RGB")
    colours = {colour: count for count, colour in pixels.getcolors(maxcolors=1 << 24)}
    assert colours[(255, 255, 255)] > 800 * 400 and len(colours) > 50
    assert sum(count for (r, g, b), count in colours.items() if g > 240 and r < 60 and b < 60) > 200, "the green line"
