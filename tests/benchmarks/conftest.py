"""Options as the command line gives them, at sizes that take no time."""

import argparse
import json
from pathlib import Path

import pytest
from tiny import FAMILIES

from benchmarks.__main__ import command_line
from benchmarks.ops.operations import PROVIDERS, Provider
from benchmarks.ops.shapes import MODES


@pytest.fixture
def ops_arguments(tmp_path):
    """Arguments of `ops` for the tiny shape, with further ones; rows go to `tmp_path`."""

    def make(*words: str) -> argparse.Namespace:
        small = "--device cpu --shapes tiny --tokens 70 --seconds 0 --results".split()
        return command_line().parse_args(["ops", *small, str(tmp_path), *words])

    return make


@pytest.fixture
def register(monkeypatch):
    """Return a function that makes the given builds the only providers of head-wise memory, by their names."""

    def make(**builds) -> None:
        table = {name: Provider(name, build, MODES, {}) for name, build in builds.items()}
        monkeypatch.setitem(PROVIDERS, "headwise_memory", table)

    return make


@pytest.fixture
def model_arguments(tmp_path):
    """Arguments of `model --quick` for a tiny Llama, with further ones; rows go to `tmp_path`."""
    config = FAMILIES["llama"].config(tie_word_embeddings=True).to_dict()
    path = Path(tmp_path) / "tiny-llama.json"
    path.write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"], "dtype": "float32"}))

    def make(*words: str) -> argparse.Namespace:
        quick = ["model", "--device", "cpu", "--base", str(path), "--quick", "--results", str(tmp_path)]
        return command_line().parse_args([*quick, *words])

    return make
