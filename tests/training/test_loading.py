"""What a run names must be a whole model with a tokenizer, have what is to be trained, and be installed."""

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from pairs import by_default
from safetensors.torch import load_file, save_file
from tiny import FAMILIES
from training.outcomes import assert_resumes, logged
from training.tiny_run import PreparedRun, refused, tiny_config, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from midus_hf import models  # noqa: F401 - registers the families that host memory
from midus_hf.training.arguments import TrainArguments
from midus_hf.training.run import run_training


def without_values(model: Path) -> None:
    """Take a tensor of a memory out of the weights of a model."""
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.memory.value_bank"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


OF_NO_MODEL = "expected the folder or Hub id of a language model: "
SPOILT = {
    "no_config": (lambda model: (model / "config.json").unlink(), OF_NO_MODEL),
    "torn_config": (lambda model: (model / "config.json").write_text("{"), OF_NO_MODEL),
    "no_weights": (lambda model: (model / "model.safetensors").unlink(), OF_NO_MODEL),
    "torn_weights": (lambda model: (model / "model.safetensors").write_bytes(b"torn"), OF_NO_MODEL),
    "no_tokenizer": (
        lambda model: [path.unlink() for path in model.glob("tokenizer*")],
        "which has no tokenizer that loads: ",
    ),
    "a_tensor_less": (
        without_values,
        r"whose checkpoint lacks 1 of its tensors, such as model.layers.1.memory.value_bank",
    ),
    **{
        f"pointer_to_{name}": (
            lambda model, name=name: (model / name).write_text("version https://git-lfs.github.com/spec/v1\n"),
            f"^{name} of MODEL is a Git LFS pointer, not the file; expected what git-lfs downloads. Run git lfs pull there",
        )
        for name in ("config.json", "model.safetensors", "tokenizer.json")
    },
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_model_that_cannot_be_loaded_is_refused(what, upscaled, config_for, tmp_path):
    model, (spoil, message) = shutil.copytree(upscaled("llama"), tmp_path / "model"), SPOILT[what]
    spoil(model)
    if message.startswith("^"):  # in words of ours alone
        message = message.replace("MODEL", re.escape(str(model)))
    else:
        message = f"^model(_name_or_path)? is '{re.escape(str(model))}'.*{message}"
    with refused(message) as refusal:
        run_training(config_for(model=model))
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out").exists()


OF_TABLES = "no memory of this model reads few rows of a large table. Leave it out"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            "base without weights",
            {},
            "trainable is 'auto', and this llama model is a base, not an upscaled model: .* Upscale it first, set trainable: all .*, "
            "or set adapters, such as",
        ),
        ("midus-hml", {"sparse_values": True}, OF_TABLES),
        ("none", {}, "config has no 'model_name_or_path'; set it in the recipe, or by --model."),
        ("fetching", {}, r"fetches blocks by the path of a text, and path_column is not given"),
        pytest.param(
            *("midus-hml", {"attn_implementation": "flash_attention_2"}, "expected the folder or Hub id .*FlashAttention2"),
            marks=pytest.mark.skipif(any(map(find_spec, ("flash_attn", "kernels"))), reason="it may be had here"),
        ),
    ],
)  # fmt: skip
def test_impossible_runs_are_refused_before_writing(kind, options, message, upscaled, fetching, corpus, tmp_path):
    base = shutil.copytree(upscaled("llama").parent / "base", tmp_path / "base")
    (base / "model.safetensors").unlink()
    model = {"midus-hml": upscaled("llama"), "none": None, "fetching": fetching, "base without weights": base}[kind]
    with refused(message):
        run_training(tiny_config(model, corpus, tmp_path / "out", **options))
    assert not (tmp_path / "out").exists()


MEMORIES = {
    "midus-hml": {"type": "midus-hml", "n": 4, "k": 2, "layers": [1]},
    "chapters": {"type": "moc", "memory_tokens": 32, "chapters": 8, "k": 2, "chunk_size": 4, "layers": [1, 3]},
}


@pytest.fixture
def begun(config_for, tmp_path):
    """Gives the options of a run that begins from a config, by default one of a Llama."""
    tokenizer = tmp_path / "tokenizer"
    tiny_tokenizer().save_pretrained(tokenizer)

    def options(output: str = "out", model_config: PreTrainedConfig | None = None, **changes) -> TrainArguments:
        file = tmp_path / "shape.json"
        (FAMILIES["llama"].config() if model_config is None else model_config).to_json_file(file, use_diff=False)
        arguments = {"model_name_or_path": None, "config_name": str(file), "tokenizer_name": str(tokenizer), **changes}
        return config_for(output, model=Path("m"), **arguments)

    return options


def shape(memory: str | None) -> PreTrainedConfig:
    """The config of a Llama, with a memory or without."""
    native = FAMILIES["llama"].config()
    if memory is None:
        return native
    values = {key: value for key, value in native.to_dict().items() if key != "model_type"}
    return AutoConfig.for_model("midus_llama", **values, memory=[MEMORIES[memory]])


@pytest.mark.parametrize("memory", by_default(["chapters"], [None, *MEMORIES]))
def test_new_model_trains_whole_and_is_saved_with_its_card(memory, begun, tmp_path):
    """Its card names no base, and nothing that is saved names a path of this machine."""
    run = PreparedRun(begun(model_config=shape(memory), max_steps=60, seed=3))
    start = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    assert all(parameter.requires_grad for parameter in run.model.parameters())
    run.execute()
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert trained.keys() == start.keys()
    # A memory adds zero at first, and what is in front of what starts at zero learns once that has moved.
    assert [name for name, tensor in start.items() if torch.equal(tensor, trained[name])] == []
    losses = logged(tmp_path / "out")
    assert sum(losses[-5:]) < sum(losses[:5])
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("w5 w7")["input_ids"] == [5, 7]
    assert "_name_or_path" not in (tmp_path / "out" / "config.json").read_text()
    card = (tmp_path / "out" / "README.md").read_text()
    _, front, text = card.split("---\n", 2)
    assert "base_model" not in yaml.safe_load(front)
    assert text.startswith("\n# out\n") and str(tmp_path) not in card
    assert "the weights were initialised at random with seed 3, for the config `shape.json`" in " ".join(text.split())
    report = yaml.safe_load(re.search(r"```yaml\n(.*)```\n$", card, flags=re.DOTALL)[1])
    of_origin = {key: value for key, value in report.items() if key.endswith(("_name", "_name_or_path"))}
    assert of_origin == {"config_name": "shape.json", "tokenizer_name": "tokenizer"} and report["trainable"] == "all"


def test_a_resumed_run_is_the_uninterrupted_one(begun):
    assert_resumes(begun, 2, max_steps=4)


def test_new_model_from_a_folder_follows_the_seed(upscaled, begun, tmp_path):
    upscaled_model = upscaled("llama")
    run = PreparedRun(begun(config_name=str(upscaled_model)))
    saved = AutoModelForCausalLM.from_pretrained(upscaled_model).state_dict()
    made = run.model.state_dict()
    again, other = (
        PreparedRun(begun(name, config_name=str(upscaled_model), seed=seed)).model.state_dict()
        for name, seed in (("again", 42), ("other", 2))
    )
    assert made.keys() == saved.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in made.items())
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(made[name], saved[name]) and not torch.equal(made[name], other[name])
    assert not hasattr(run.model.config, "upscale")
    with refused("trainable is 'new', but the config of this midus_llama model records no new"):
        PreparedRun(begun("new", config_name=str(upscaled_model), trainable="new"))
    with refused(r"trainable is \['value'\], but the config of this midus_llama model records no new layers"):
        PreparedRun(begun("value", config_name=str(upscaled_model), trainable=["value"]))


def test_config_of_a_model_with_packs_is_refused(begun):
    values = {key: value for key, value in shape(None).to_dict().items() if key != "model_type"}
    config = AutoConfig.for_model("midus_llama", **values, memory=[{"type": "packs", "layers": [0]}])
    with refused(
        r"config_name is '.*shape\.json', whose model has packs, and a new model has no glossary; expected a config"
    ):
        PreparedRun(begun(model_config=config))


IMAGES = AutoConfig.for_model("vit", vocab_size=128, max_position_embeddings=128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"config_name": "absent.json"},
            r"config_name is 'absent\.json'; expected the file, folder or Hub id of a language model's config",
        ),
        ({"config_name": "./absent"}, r"config_name is '\./absent'; expected the file, folder or Hub id of a language"),
        ({"tokenizer_name": "./absent"}, r"tokenizer_name is '\./absent'; expected the folder or Hub id of a tokenizer: "),
        ({"attn_implementation": "none_such"}, "Specified `attn_implementation=.none_such.` is not supported"),
        ({"sequence_length": 999}, "sequence_length is 999, but the model has positions for 128 tokens"),
        *(
            ({"model_config": IMAGES, "attn_implementation": attention}, r"config_name is '.*shape\.json'; expected the file, folder")
            for attention in (None, "eager")
        ),
        ({"output_dir": "tokenizer/out"}, "which lies in the tokenizer_name "),
    ],
)  # fmt: skip
def test_unloadable_configs_are_refused_in_one_line(changes, message, begun, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(message) as refusal:
        PreparedRun(begun(**changes))
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out").exists()
