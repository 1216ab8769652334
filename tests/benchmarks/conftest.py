"""Options as the command line gives them, at sizes that take no time."""

import argparse
import json
from pathlib import Path

import pytest
from tiny import FAMILIES

from benchmarks.models import options as model_options
from benchmarks.ops import options as op_options


def _parsed(module, words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_command(parser.add_subparsers())
    return parser.parse_args(words)


@pytest.fixture
def ops_arguments(tmp_path):
    """Arguments of `ops` for the tiny shape, with further ones; rows go to `tmp_path`."""

    def make(*words: str) -> argparse.Namespace:
        small = [
            "ops",
            "--device",
            "cpu",
            "--shapes",
            "tiny",
            "--tokens",
            "70",
            "--seconds",
            "0",
            "--results",
            str(tmp_path),
        ]
        return _parsed(op_options, [*small, *words])

    return make


@pytest.fixture
def model_arguments(tmp_path):
    """Arguments of `model --quick` for a tiny Llama, with further ones; rows go to `tmp_path`."""
    config = FAMILIES["llama"].config(tie_word_embeddings=True).to_dict()
    path = Path(tmp_path) / "tiny-llama.json"
    path.write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"], "dtype": "float32"}))

    def make(*words: str) -> argparse.Namespace:
        quick = ["model", "--device", "cpu", "--base", str(path), "--quick", "--results", str(tmp_path)]
        return _parsed(model_options, [*quick, *words])

    return make
