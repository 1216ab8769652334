"""What a result came from: digests of texts and of the base, the code and the machine."""

import subprocess
from pathlib import Path

import pytest
import torch
import transformers
from compare.small_comparison import SmallComparison, write_room

from midus_hf.compare import origins
from midus_hf.compare.origins import Inputs, base_digest, code, machine, short, text_digest
from midus_hf.compare.runs import base_run
from midus_hf.version import __version__


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    return write_room(tmp_path_factory.mktemp("room"))


def test_the_digest_of_a_folder_is_that_of_its_files_and_their_names(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "2.txt").write_text("two")
        (tmp_path / name / "inner" / "1.txt").write_text("one")
    before = text_digest(str(tmp_path / "a"))
    assert before == text_digest(str(tmp_path / "b"))
    (tmp_path / "a" / "2.txt").rename(tmp_path / "a" / "3.txt")
    (tmp_path / "b" / "2.txt").write_text("too")
    assert len({before, text_digest(str(tmp_path / "a")), text_digest(str(tmp_path / "b"))}) == 3
    # A file counts by its bytes, and what is no path by its name.
    assert text_digest(str(tmp_path / "a" / "inner" / "1.txt")) == text_digest(str(tmp_path / "b" / "inner" / "1.txt"))
    assert text_digest("owner/corpus") != text_digest("owner/other")


def test_the_base_counts_by_its_weights_and_its_config(room):
    base = room / "base"
    before = base_digest(str(base))
    (base / "notes.txt").write_text("not read")
    assert base_digest(str(base)) == before
    for name in ("config.json", "tokenizer_config.json"):
        usual = (base / name).read_text()
        (base / name).write_text(usual + " ")
        assert base_digest(str(base)) != before
        (base / name).write_text(usual)


def test_each_text_is_read_once_for_all_variants(room, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(origins, "text_digest", lambda path: read.append(path) or path)
    comparing = SmallComparison(room, tmp_path, {"a": {}, "b": {"train": {"corpus": str(room / "corpus" / "1.txt")}}})
    inputs = Inputs(comparing.comparison)
    first, second = map(inputs.digests_for, comparing.variants)
    assert first["data"] != second["data"] and first["base"] == second["base"]
    assert inputs.digests_for(base_run(comparing.comparison).variant) == first
    assert sorted(read) == sorted(set(read)) and len(read) == 5


def test_a_result_says_with_what_it_was_made(room, tmp_path):
    comparing = SmallComparison(room, tmp_path, {"full": {}})
    base = comparing.measure_base()
    assert base.origin == {**comparing.inputs.digests_for(comparing.variants[0]), "code": code(), "machine": machine()}
    assert base.origin["machine"]["torch"] == torch.__version__
    assert base.origin["machine"]["transformers"] == transformers.__version__ and base.origin["machine"]["processor"]
    assert base.origin["code"]["version"] == __version__ and len(base.origin["code"]["sources"]) == 64


def test_the_code_of_a_repository_has_its_commit_and_whether_it_was_changed(tmp_path, monkeypatch):
    for name in ("midus_hf", "upscalers"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    monkeypatch.setattr(origins, "_ROOT", tmp_path)
    assert set(code()) == {"version", "sources"} and short("code", {"code": code()}).startswith(f"{__version__} (")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "m"]):
        subprocess.run([*git, *words], check=True)
    committed = code()
    assert len(committed["commit"]) == 40 and committed["changed"] is False
    (tmp_path / "upscalers" / "__init__.py").write_text("1")
    assert code() == {**committed, "changed": True, "sources": code()["sources"]} != committed

    def absent(*_, **__):
        raise FileNotFoundError("git")

    monkeypatch.setattr(origins.subprocess, "run", absent)
    assert set(code()) == {"version", "sources"}
