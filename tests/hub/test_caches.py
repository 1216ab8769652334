"""Caches of the Hub as people have them: offline, moved, read-only, with a file that is gone, and shared."""

import os
from pathlib import Path

import pytest
from hub.day import BASE, ended, without_root_writing

pytestmark = pytest.mark.product
PRO = ("--method", "llama-pro")
PACKS = ("--method", "packs", "--corpus", "glossary.jsonl")


@pytest.fixture(scope="module")
def upscaled(day):
    """Upscale the base of the Hub with a cache; the output's folder is named."""

    def run(name: str, home: Path, *words: str, **options):
        return day.run("upscale", "--base", BASE, *(words or PRO), "--output", day.folder / name, home=home, **options)

    return run


@pytest.fixture
def cached(day, upscaled) -> Path:
    """A cache that has all that upscaling by packs reads."""
    home = day.new_home()
    assert upscaled(f"first-{home.name}", home, *PACKS).status == 0
    return home


@pytest.mark.parametrize("words", [PRO, PACKS])
def test_cached_base_needs_no_hub(words, cached, upscaled, day):
    day.hub.log.clear()
    done = upscaled(f"offline-{words[1]}", cached, *words, HF_HUB_OFFLINE="1")
    assert (done.status, day.hub.log) == (0, []), done.err


def test_moved_cache_needs_no_hub(cached, upscaled):
    moved = cached.rename(cached.with_name("moved"))
    assert upscaled("from-moved", moved, HF_HUB_OFFLINE="1").status == 0


def test_read_only_cache_is_read(cached, upscaled):
    paths = [path for path in cached.rglob("*") if not path.is_symlink()]
    modes = {path: path.stat().st_mode for path in (cached, *paths)}
    for path in modes:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        options = {"preexec_fn": without_root_writing()} if os.geteuid() == 0 else {}
        done = upscaled("from-read-only", cached, **options)
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    assert done.status == 0, done.err


def test_file_that_is_gone_is_fetched_again(cached, upscaled):
    (snapshot,) = cached.glob("hub/models--*/snapshots/*")
    weights = next(snapshot.glob("*.safetensors"))
    weights.resolve().unlink()
    refused = upscaled("offline-without", cached, HF_HUB_OFFLINE="1")
    assert refused.status == 2
    assert "HF_HUB_OFFLINE" in refused.err
    assert "Traceback" not in refused.err
    assert upscaled("again", cached).status == 0
    assert weights.exists()


def test_two_processes_fill_one_cache(day):
    home, words = day.new_home(), ("upscale", "--base", BASE, *PRO, "--no-verify", "--output")
    processes = [day.start(*words, day.folder / f"both-{number}", home=home) for number in range(2)]
    for done in map(ended, processes):
        assert done.status == 0, done.err
