"""Pages of answers: sections in order, text as text, pictures within, and nothing from elsewhere."""

import base64
import io
import re

import pytest

from midus_hf.look.page import Answer, TextTable


def test_page_has_ordered_sections_and_no_other_file(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    answer = Answer(
        title="What <slots> do",
        summary="A model read a text.",
        report={},
        tables=[TextTable("Slots", ["slot", "share"], [["3", "25.0%"]]), TextTable("Empty", ["slot"], [])],
        panels={"A green line": lambda axes: axes.plot([0, 1], [0, 1], color="#00ff00", linewidth=8)},
    )
    joined = Answer(title="All of it", summary="On a text.", report={}, tables=[], sections=[answer, answer])
    joined.write(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    section = ["What &lt;slots&gt; do", "Slots", "Picture"]
    assert re.findall(r"<h[123]>(.*?)</h[123]>", page) == ["All of it", *section, *section]
    assert page.count("<tr><td>3</td><td>25.0%</td></tr>") == 2
    sources = re.findall(r"""(?:src|href)=["'](.*?)["']""", page)
    assert len(sources) == 2
    for source in sources:
        picture = image.imread(io.BytesIO(base64.b64decode(source.removeprefix("data:image/png;base64,"))))
        assert ((picture[..., :3] == (0, 1, 0)).all(-1)).sum() > 200, "the green line"
