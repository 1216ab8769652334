"""What a run names must be a whole model with a tokenizer, have what is to be trained, and be installed."""

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from training.tiny_run import refused, tiny_config
from transformers import LlamaConfig, MambaConfig

from midus_hf.training.loading import check_sequence_length
from midus_hf.training.run import train


def without_values(model: Path) -> None:
    """Take a tensor of a memory out of the weights of a model."""
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.memory.value_bank"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda model: (model / "config.json").unlink(), "expected the folder or Hub id of a language model: "),
        (lambda model: (model / "config.json").write_text("{"), "expected the folder or Hub id of a language model: "),
        (lambda model: (model / "model.safetensors").unlink(), "expected the folder or Hub id of a language model: "),
        (lambda model: (model / "model.safetensors").write_bytes(b"torn"), "expected the folder or Hub id of a language model: "),
        (lambda model: [path.unlink() for path in model.glob("tokenizer*")], "which has no tokenizer that loads: "),
        (without_values, r"whose checkpoint lacks 1 of its tensors, such as model.layers.1.memory.value_bank"),
        *(
            (
                lambda model, name=name: (model / name).write_text("version https://git-lfs.github.com/spec/v1\n"),
                f": {name} of .* is a Git LFS pointer, not the file; expected what git-lfs downloads. Run git lfs pull there",
            )
            for name in ("config.json", "model.safetensors", "tokenizer.json")
        ),
    ],
    ids=[
        *("no_config", "torn_config", "no_weights", "torn_weights", "no_tokenizer", "a_tensor_less"),
        *("pointer_to_config", "pointer_to_weights", "pointer_to_tokenizer"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_loaded_is_refused(upscaled, config_for, tmp_path, spoil, message):
    model = tmp_path / "model"
    shutil.copytree(upscaled("llama"), model)
    spoil(model)
    with refused(f"^model(_name_or_path)? is '{re.escape(str(model))}'.*{message}") as refusal:
        train(config_for(model=model))
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_a_base_without_the_layers_that_are_to_train_is_refused_before_its_weights_are_read(
    upscaled, config_for, tmp_path
):
    base = tmp_path / "base"
    shutil.copytree(upscaled("llama").parent / "base", base)
    (base / "model.safetensors").unlink()
    with refused(
        "trainable is 'auto', and this llama model is a base, not an upscaled model: .* Upscale it first, set trainable: all .*, "
        "or set adapters, such as"
    ):
        train(config_for(model=base))
    assert not (tmp_path / "out").exists()


OF_TABLES = "no memory of this model reads few rows of a large table; expected one of type ultramem, chapters or ngram. Leave it out"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("headwise", {"sparse_values": True}, OF_TABLES),
        ("none", {}, "model_name_or_path is None; expected the folder or Hub id of the model"),
        ("fetching", {}, r"fetches blocks by the path of a text, and path_column is not given"),
    ],
)
def test_what_a_model_cannot_do_is_refused_before_anything_is_written(
    kind, options, message, upscaled, fetching, corpus, tmp_path
):
    model = {"headwise": lambda: upscaled("llama"), "none": lambda: None, "fetching": lambda: fetching}[kind]()
    with refused(message):
        train(tiny_config(model, corpus, tmp_path / "out", **options))
    assert not (tmp_path / "out").exists()


def test_a_base_that_was_not_upscaled_can_train_whole(upscaled, config_for):
    base = upscaled("llama").parent / "base"
    assert train(config_for(model=base, trainable="all", max_steps=1)).steps == 1


def test_a_sequence_longer_than_the_model_has_positions_for_is_refused_before_anything_is_loaded(upscaled, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(upscaled("llama"), model)
    for name in ("model.safetensors", "tokenizer.json"):
        (model / name).unlink()
    with refused(r"sequence_length is 129, but the model has positions for 128 tokens\. Lower "):
        train(tiny_config(model, tmp_path / "absent", tmp_path / "out", sequence_length=129))
    config = LlamaConfig(max_position_embeddings=64)
    check_sequence_length("sequence_length", 64, config)
    with refused(r"positions for 64 tokens"):
        check_sequence_length("sequence_length", 65, config)
    check_sequence_length("sequence_length", 1_000_000, MambaConfig())  # which has none


@pytest.mark.skipif(any(map(find_spec, ("flash_attn", "kernels"))), reason="it may be had here")
def test_an_attention_whose_package_is_absent_is_refused_before_anything_is_written(config_for, tmp_path):
    with refused("expected the folder or Hub id of a language model: .*FlashAttention2"):
        train(config_for(attn_implementation="flash_attention_2"))
    assert not (tmp_path / "out").exists()
