"""A manifest names the first file of its folder that is not what was written."""

import json

import pytest

from midus_hf.files.manifest import describe_files, first_damage


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "weights").write_bytes(bytes(range(256)))
    (tmp_path / "inner" / "state").write_bytes(b"state")
    return tmp_path


@pytest.fixture
def manifest(folder):
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return json.loads(json.dumps(describe_files(folder, paths)))


def test_a_folder_that_is_as_it_was_written_has_no_damage(folder, manifest):
    (folder / "notes.txt").write_text("of a person's")
    assert set(manifest) == {"weights", "inner/state"}
    assert first_damage(folder, manifest) is None


def _flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage, line",
    [
        (lambda path: path.unlink(), "inner/state is missing"),
        (lambda path: path.write_bytes(b"stat"), "inner/state has 4 bytes instead of 5"),
        (_flip_a_bit, "inner/state does not have the contents that were written"),
        (lambda path: (path.unlink(), path.mkdir()), "inner/state has"),
    ],
    ids=["missing", "short", "flipped", "folder"],
)
def test_the_damaged_file_is_named(folder, manifest, damage, line):
    damage(folder / "inner" / "state")
    assert first_damage(folder, manifest).startswith(line)


@pytest.mark.parametrize("entry", [None, {}, {"bytes": 256}, []], ids=str)
def test_a_manifest_that_is_damaged_itself_vouches_for_nothing(folder, entry):
    assert first_damage(folder, {"weights": entry}) == "its manifest is damaged"
    assert first_damage(folder, []) == "its manifest is damaged"
