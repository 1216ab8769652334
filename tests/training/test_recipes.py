"""The recipes in `configs/train` and `configs/sft` are read, say what papers and releases say, and fit what makes their models."""

import json
import re
import shlex
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from midus_hf import models  # noqa: F401 - registers the families that host memory
from midus_hf.cli.run_arguments import read_arguments
from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.config.yaml_options import read_mapping
from midus_hf.memories.moc.options import PAPER, MocOptions
from midus_hf.memories.registry import read_memories
from midus_hf.training.arguments import TrainArguments
from midus_hf.training.sft.run import SftArguments
from upscalers.architecture.flops import count_parameters
from upscalers.plan import place

REPOSITORY = Path(__file__).parents[2]
RECIPES, OF_CHATS, CONFIGS = (REPOSITORY / "configs" / name for name in ("train", "sft", "models"))
FILES = [*sorted(RECIPES.glob("*.yaml")), *sorted(OF_CHATS.glob("*.yaml"))]
MODELS = {path.stem: json.loads(path.read_text()) for path in sorted(CONFIGS.glob("*.json"))}
# What a recipe may leave to the command line.
GIVEN = {"model_name_or_path": "m", "output_dir": "o"}

# Of each run: its recipe with the words after it, which the recipe's comments name, and what its paper says: sequences of a step,
# tokens of the run, steps of the warm-up, and the rate of all but memories.
_WITHOUT_MEMORY = "--memory_learning_rate null --value_learning_rate null --value_schedule null --value_weight_decay 0"
_OF_TABLE_6 = "--tokenizer_name openai-community/gpt2 --corpus HuggingFaceFW/fineweb-edu --corpus_name sample-100BT "
_OF_TABLE_6 += "--sequence_length 1024"
_ON_8B = "--learning_rate 5.0e-5 --per_device_train_batch_size 2 --gradient_accumulation_steps 32 --activation_checkpointing true"
_SMALLER = "--per_device_train_batch_size 3 --max_steps 158945 --warmup_steps 0.02"
_CONFIGS = "--config_name configs/models"
_MOC, _MODA, _SMALL_MODA = (1024, 9600 * 2**20, 250, 3e-4), (1024, 4e11, 2000, 3e-4), (1024, 1e11, 2000, 3e-4)
RUNS = {
    "midus-hml": ("midus-hml", (64, 1.5e9, 1145, 1e-4)),
    "midus-hml-8b": (f"midus-hml {_ON_8B}", (64, 1.5e9, 1145, 5e-5)),
    "hier-ffn": ("hier-ffn", (1024, 2**40, 5002, 1e-4)),
    "moc-371m": ("moc-371m", _MOC),
    **{name: (f"moc-371m {_CONFIGS}/{name}.json {_WITHOUT_MEMORY}", _MOC) for name in ("vanilla-148m", "vanilla-203m")},
    "moda-706m": ("moda-706m", _MODA),
    "olmo2-669m": (f"moda-706m {_CONFIGS}/olmo2-669m.json", _MODA),
    **{name: (f"moda-706m {_CONFIGS}/{name}.json {_OF_TABLE_6}", _SMALL_MODA) for name in ("moda-74m", "moda-128m")},
    "ultramem-v2-1b-7b": ("ultramem-v2-1b-7b", (1024, 1e12, 2504, 4e-4)),
    "ultramem-v2-227m-1.2b": (f"ultramem-v2-1b-7b {_CONFIGS}/ultramem-v2-227m-1.2b.json {_SMALLER}", (768, 5e11, 3179, 4e-4)),
}  # fmt: skip


def read(path: Path, *words: str) -> TrainArguments:
    stated = {line.partition(":")[0] for line in path.read_text(encoding="utf-8").splitlines()}
    stated |= {"model_name_or_path"} if "config_name" in stated else set()
    kind = TrainArguments if path.parent == RECIPES else SftArguments
    given = {**GIVEN, kind.data_key: "c"}
    given = [f"--{key}={value}" for key, value in given.items() if key not in stated]
    return read_arguments(kind, [str(path), *given, *words])


def test_nothing_goes_unchecked():
    named = {words.partition(" ")[0] for words, _ in RUNS.values()} | {"demo"}
    assert named == {path.stem for path in RECIPES.glob("*.yaml")}
    assert MODELS.keys() <= RUNS.keys()


@pytest.mark.parametrize("name", RUNS)
def test_recipe_has_the_sizes_of_its_paper(name):
    words, (sequences, tokens, warmup, rate) = RUNS[name]
    file, *changes = words.split()
    path = RECIPES / f"{file}.yaml"
    config, text = read(path, *changes), path.read_text(encoding="utf-8")
    for key, value in zip(*[iter(changes)] * 2, strict=True):
        # The comments name several configs after one key.
        assert (value.rpartition("/")[2] if key == "--config_name" else f"{key} {value}") in text, key
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == sequences
    step = sequences * config.sequence_length
    assert abs(config.max_steps * step - tokens) <= step
    assert (config.get_warmup_steps(config.max_steps), config.learning_rate) == (warmup, rate)
    if config.config_name is not None:
        assert (config.model_name_or_path, config.config_name) == (None, f"configs/models/{name}.json")
        assert config.sequence_length <= MODELS[name]["max_position_embeddings"]
        loaded = AutoConfig.from_pretrained(CONFIGS / f"{name}.json")
        assert AutoModelForCausalLM._model_mapping[type(loaded)].__name__ == loaded.architectures[0]
        assert file != "moc-371m" or loaded.rope_parameters["rope_theta"] == 100_000


def test_matched_baseline_trains_layers_llama_pro_copies():
    matched = [index - 1 - earlier for earlier, index in enumerate(place("llama-pro", 16, 8))]
    assert f"--trainable {str(matched).replace(' ', '')}" in (RECIPES / "midus-hml.yaml").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_commands_in_a_recipe_make_its_model_and_run_it(path):
    text, model, command = path.read_text(encoding="utf-8"), read(path).model_name_or_path, path.parent.name
    assert re.findall(rf"^#   midus {command} (\S+)", text, re.MULTILINE) == [f"configs/{command}/{path.name}"]
    made = re.findall(r"^#   upscale (.+) --output (\S+)$", text, re.MULTILINE)
    if command == "sft":  # which starts from what its pretraining makes
        made = "" if path.stem != "midus-hml" else (RECIPES / path.name).read_text(encoding="utf-8")
        assert not made or f"output_dir: {model}\n" in made
        return
    assert [output for _, output in made] == ([] if model in ("m", None) else [model])
    for arguments, _ in made:
        stated = dict(zip(*[iter(arguments.split())] * 2, strict=True))
        if "--config" in stated:
            stated = {f"--{key}": value for key, value in read_mapping(REPOSITORY / stated["--config"]).items()}
        assert (stated["--base"], stated["--method"]) == ("meta-llama/Llama-3.2-1B", path.stem)


@pytest.mark.parametrize(
    ("variant", "rates", "frozen"),
    [("bank frozen", (1.5e-5, None), ["value"]), (None, (1.5e-5, 5e-6), []), ("bank at the rate", (None, None), [])],
)
def test_moc_recipe_names_how_the_bank_can_train(variant, rates, frozen):
    lines = (OF_CHATS / "moc-371m.yaml").read_text(encoding="utf-8").splitlines()
    line = next((line for line in lines if variant and line.startswith(f"#   {variant}")), ":")
    config = read(OF_CHATS / "moc-371m.yaml", *shlex.split(line.partition(":")[2]))
    assert (config.memory_learning_rate, config.value_learning_rate) == rates
    assert (config.frozen, config.value_schedule) == (frozen, None if frozen else "fixed")


@pytest.mark.parametrize("name", [name for name, config in MODELS.items() if config.get("memory")])
def test_a_config_has_every_option_of_its_memory_written_out(name):
    config = MODELS[name]
    (entry,) = config["memory"]
    layers = config["num_hidden_layers"]
    sizes = ModelSizes(hidden_size=config["hidden_size"], num_heads=config["num_attention_heads"], num_layers=layers)
    (declared,) = read_memories([entry], sizes).entries
    assert entry == declared.to_dict()
    assert declared.layers == ((2, 6, 10, 14) if name == "moc-371m" else tuple(range(layers)))
    assert name != "moc-371m" or declared.options == MocOptions(**PAPER)


@pytest.mark.parametrize(
    ("name", "memory", "used", "used_without", "total"),
    [
        # 225 M of 1.18 B: what a token uses counts embeddings there, and the total does not, as in the table's row of OLMoE.
        ("ultramem-v2-227m-1.2b", {}, 225, None, 1.18),
        # 1,079 M of 6.70 B. With 528 keys, as the table says, the total is 6.21 B; with 552 it is 6.69 B.
        ("ultramem-v2-1b-7b", {}, None, 1079, 6.21),
        ("ultramem-v2-1b-7b", {"n": 552}, None, 1080, 6.69),
    ],
    ids=str,
)
def test_a_model_has_the_parameters_of_table_7(name, memory, used, used_without, total):
    """In millions that a token uses, with and without embeddings, and in billions of the total without them."""
    config = {**MODELS[name], "memory": [{**MODELS[name]["memory"][0], **memory}]}
    counts = count_parameters(config)
    assert used is None or abs(counts["activated"] / 1e6 - used) < 1
    assert used_without is None or round(counts["activated_without_embeddings"] / 1e6) == used_without
    assert round(counts["total_without_embeddings"] / 1e9, 2) == total
