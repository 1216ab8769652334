"""A JSON file of a user that cannot be read is refused by its path."""

import re

import pytest

from midus_hf.files.json_text import read_json


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "Expecting property name"),
        (b"\xff\xfe", "'utf-8' codec can't decode"),
        (b"[" * 100_000, "it is nested too deeply"),
        (None, "No such file or directory"),
    ],
)
def test_unreadable_json_is_refused_by_its_path(content, reason, tmp_path):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))} is not JSON, or cannot be read \(.*{reason}"):
        read_json(path)
