"""Checkpoints and texts that the training tests share."""

import importlib.util
import json
from functools import cache
from pathlib import Path

import pytest
from tiny import FAMILIES, tiny_model
from training.tiny_run import (
    LEAVES,
    NEW_LAYERS,
    block_config,
    document,
    letter_tokenizer,
    save_upscaled,
    tiny_config,
    tiny_tokenizer,
    write_corpus,
    write_recipe,
)
from transformers import PreTrainedConfig

from midus_hf.training.arguments import TrainArguments

# DeepSpeed is no dependency: `make test-deepspeed` has it.
collect_ignore = [] if importlib.util.find_spec("deepspeed") else ["parallel/test_deepspeed.py"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(scope="session")
def upscaled(tmp_path_factory):
    @cache
    def made(family: str, method: str, options: str) -> Path:
        return save_upscaled(family, tmp_path_factory.mktemp(f"upscaled_{family}"), method, json.loads(options))

    return lambda family="llama", method="midus-hml", **options: made(family, method, json.dumps(options))


@pytest.fixture(scope="session")
def native(tmp_path_factory):

    @cache
    def made(family: str) -> Path:
        folder = tmp_path_factory.mktemp(f"native_{family}")
        tiny_model(family, num_hidden_layers=6).save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["upscale"] = {
            **{"method": "llama-pro", "options": {"identity": "auto"}, "seed": 0, "trainable": "new"},
            **{"new_layers": NEW_LAYERS, "plan": [{"new": layer in NEW_LAYERS} for layer in range(6)]},
            **{"base_dtype": "float32", "base_config": {**config, "num_hidden_layers": 4}},
        }
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        letter_tokenizer().save_pretrained(folder)
        return folder

    return made


@pytest.fixture(scope="session")
def fetching(upscaled) -> Path:
    return upscaled("llama", "hier-ffn")


@pytest.fixture(scope="session")
def assigned(tmp_path_factory) -> Path:
    path, leaves = tmp_path_factory.mktemp("assigned") / "corpus.jsonl", LEAVES * 6
    rows = [{"text": document(30, leaf), "memory_ids": [leaf // 3, leaf]} for leaf in leaves]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def config_for(upscaled, corpus, tmp_path):
    def config(
        output: str | Path = "out", family: str = "llama", model: Path | None = None, **changes
    ) -> TrainArguments:
        return tiny_config(model or upscaled(family), changes.pop("corpus", corpus), tmp_path / output, **changes)

    return config


@pytest.fixture
def blocks_for(fetching, assigned, tmp_path):
    def config(
        output: str | Path = "out", model: Path = fetching, corpus: Path = assigned, **changes
    ) -> TrainArguments:
        return block_config(model, corpus, tmp_path / output, **changes)

    return config


@pytest.fixture
def begun(config_for, tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")

    def options(output: str = "out", model_config: PreTrainedConfig | None = None, **changes) -> TrainArguments:
        file = tmp_path / "shape.json"
        (FAMILIES["llama"].config() if model_config is None else model_config).to_json_file(file, use_diff=False)
        arguments = {"config_name": str(file), "tokenizer_name": str(tmp_path / "tokenizer"), **changes}
        return config_for(output, model=Path("m"), **{"model_name_or_path": None, **arguments})

    return options


@pytest.fixture
def words(upscaled, corpus, tmp_path) -> list[str]:
    """What the command is told of a run that is long enough to be stopped."""
    recipe = write_recipe(tmp_path, upscaled("llama"), corpus, max_steps=100_000)
    return [str(recipe), f"--output_dir={tmp_path / 'out'}"]
