"""A file that is written whole takes its place at once, and nothing is left of one that is not."""

import os

import pytest

from midus_hf.whole_files import whole_file


def test_it_is_there_when_it_is_complete(tmp_path):
    place = tmp_path / "record.json"
    place.write_text("old")
    with whole_file(place) as partial:
        partial.write_text("new")
        assert place.read_text() == "old" and partial.parent == place.parent
    assert place.read_text() == "new" and list(tmp_path.iterdir()) == [place]


def test_after_an_error_the_old_one_stays_alone(tmp_path):
    place = tmp_path / "record.json"
    place.write_text("old")
    with pytest.raises(KeyError), whole_file(place) as partial:
        partial.write_text("half")
        raise KeyError
    assert place.read_text() == "old" and list(tmp_path.iterdir()) == [place]


def test_it_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr("os.fsync", lambda _: order.append("synced"))
    honest = os.replace
    monkeypatch.setattr("os.replace", lambda *paths: (order.append("replaced"), honest(*paths)))
    with whole_file(tmp_path / "record.json") as partial:
        partial.write_text("new")
    assert order == ["synced", "replaced"]
