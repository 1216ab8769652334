"""A run may begin from a config: weights follow from the seed, everything trains, and all else is as in any run."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from pairs import by_default
from tiny import FAMILIES
from training.outcomes import assert_resumes, logged
from training.tiny_run import refused, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from midus_hf import models  # noqa: F401 - registers the families that host memory
from midus_hf.training.arguments import TrainArguments
from midus_hf.training.run import TrainingRun, train

MEMORIES = {
    "headwise": {"type": "headwise", "n": 4, "k": 2, "layers": [1]},
    "chapters": {"type": "chapters", "memory_tokens": 32, "chapters": 8, "k": 2, "chunk_size": 4, "layers": [1, 3]},
}


@pytest.fixture
def tokenizer(tmp_path) -> Path:
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def begun(tokenizer, config_for, tmp_path):
    """Gives the options of a run that begins from a config, by default one of a Llama."""

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
def test_everything_trains_and_learns_and_the_model_is_saved_with_its_tokenizer(memory, begun, tmp_path):
    run = TrainingRun(begun(model_config=shape(memory), max_steps=60))
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


def test_weights_follow_from_the_seed(begun):
    first, again, other = (
        TrainingRun(begun(name, seed=seed)).model.state_dict() for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_a_resumed_run_is_the_uninterrupted_one(begun):
    assert_resumes(begun, 2, max_steps=4)
    with refused(r"seed is 5, but the run to resume has 'its default'; give the same"):
        train(begun("parts", max_steps=4, save_steps=2, save_total_limit=None, resume_from_checkpoint=True, seed=5))


def test_the_card_names_no_base_and_no_local_path(begun, tmp_path):
    train(begun(seed=3, max_steps=1))
    card = (tmp_path / "out" / "README.md").read_text()
    _, front, text = card.split("---\n", 2)
    assert "base_model" not in yaml.safe_load(front)
    assert text.startswith("\n# out\n")
    assert "the weights were made at random by seed 3, for the config `shape.json`" in " ".join(text.split())
    report = yaml.safe_load(re.search(r"```yaml\n(.*)```\n$", card, flags=re.DOTALL)[1])
    assert "model_name_or_path" not in report
    assert (report["config_name"], report["tokenizer_name"]) == ("shape.json", "tokenizer")
    assert (report["trainable"], str(tmp_path) in card) == ("all", False)


def test_the_config_of_a_folder_is_read_without_its_weights_and_its_record_of_a_base(upscaled, begun, tmp_path):
    upscaled_model = upscaled("llama")
    run = TrainingRun(begun(config_name=str(upscaled_model)))
    saved = AutoModelForCausalLM.from_pretrained(upscaled_model).state_dict()
    made = run.model.state_dict()
    assert made.keys() == saved.keys()
    assert not torch.equal(made["model.layers.0.mlp.up_proj.weight"], saved["model.layers.0.mlp.up_proj.weight"])
    assert not hasattr(run.model.config, "upscale")
    with refused("what trains is 'new', but the config of this midus_llama model records no new"):
        TrainingRun(begun("other", config_name=str(upscaled_model), trainable="new"))


def test_listed_layers_alone_may_train(begun):
    model = TrainingRun(begun(trainable=[1])).model
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if ".layers.1." in name}


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
    ],
)  # fmt: skip
def test_what_cannot_be_loaded_is_refused_in_one_line(changes, message, begun, tmp_path):
    with refused(message) as refusal:
        TrainingRun(begun(**changes))
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("attention", [None, "eager"])
def test_a_config_of_another_kind_of_model_is_refused(attention, begun, tmp_path):
    config = AutoConfig.for_model("vit", vocab_size=128, max_position_embeddings=128)
    with refused(r"config_name is '.*shape\.json'; expected the file, folder or Hub id of a"):
        TrainingRun(begun(model_config=config, attn_implementation=attention))
    assert not (tmp_path / "out").exists()


def test_the_output_may_not_hold_the_tokenizer(begun, tokenizer):
    with refused("which lies in the tokenizer_name "):
        TrainingRun(begun(output_dir=str(tokenizer / "out")))
