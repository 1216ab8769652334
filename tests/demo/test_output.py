"""What a demonstration does with the folder that --output names."""

import pytest

from demo import empty_folder


def test_files_of_a_person_stay(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(SystemExit, match=r"which holds files; expected a new or an empty folder"):
        empty_folder(tmp_path, tmp_path / "default")
    with pytest.raises(SystemExit, match=r"expected a new or an empty folder"):
        empty_folder(tmp_path / "thesis.txt", tmp_path / "default")
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    assert empty_folder(tmp_path / "new", tmp_path / "default").is_dir()


def test_what_an_earlier_run_left_in_the_default_folder_goes(tmp_path):
    (tmp_path / "upscaled").mkdir()
    assert not list(empty_folder(tmp_path, tmp_path).iterdir())
