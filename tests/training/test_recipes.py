"""The recipes in `configs/train` are read, say what papers and releases say, and fit what makes their models."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from midus_hf import models  # noqa: F401 - registers the families that host memory
from midus_hf.cli.flops import count_parameters
from midus_hf.cli.train import read_arguments
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.config.yaml_options import read_mapping
from midus_hf.memories.chapters.options import PAPER, ChaptersOptions
from midus_hf.memories.entries import read_memories
from midus_hf.training.arguments import TrainArguments
from midus_hf.training.optim.freezing import set_trainable
from tests.upscalers.real_configs import LLAMA_3_2_1B, write_config
from upscalers.plan.placements import place
from upscalers.runs.upscale import upscale

REPOSITORY = Path(__file__).parents[2]
RECIPES, UPSCALING = REPOSITORY / "configs" / "train", REPOSITORY / "configs" / "upscale"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
# What a recipe may leave to the command line.
GIVEN = {"model_name_or_path": "m", "output_dir": "o", "corpus": "c"}

# Models and runs, the recipe of each, and the words behind it, which its comments name.
_WITHOUT_MEMORY = "--memory_learning_rate null --value_learning_rate null --value_schedule null --value_weight_decay 0"
_OF_TABLE_6 = (
    "--tokenizer_name openai-community/gpt2 --corpus HuggingFaceFW/fineweb-edu --corpus_name sample-100BT "
    "--sequence_length 1024"
)
RUNS = {
    "midus-hml": ("midus-hml", ""),
    "hier-ffn": ("hier-ffn", ""),
    "midus-hml-8b": (
        "midus-hml",
        "--learning_rate 5.0e-5 --per_device_train_batch_size 2 --gradient_accumulation_steps 32 --activation_checkpointing true",
    ),
    "moc-371m": ("moc-371m", ""),
    "vanilla-148m": ("moc-371m", f"--config_name configs/models/vanilla-148m.json {_WITHOUT_MEMORY}"),
    "vanilla-203m": ("moc-371m", f"--config_name configs/models/vanilla-203m.json {_WITHOUT_MEMORY}"),
    "moda-706m": ("moda-706m", ""),
    "olmo2-669m": ("moda-706m", "--config_name configs/models/olmo2-669m.json"),
    "moda-74m": ("moda-706m", f"--config_name configs/models/moda-74m.json {_OF_TABLE_6}"),
    "moda-128m": ("moda-706m", f"--config_name configs/models/moda-128m.json {_OF_TABLE_6}"),
    "ultramem-v2-1b-7b": ("ultramem-v2-1b-7b", ""),
    "ultramem-v2-227m-1.2b": (
        "ultramem-v2-1b-7b",
        "--config_name configs/models/ultramem-v2-227m-1.2b.json --per_device_train_batch_size 3 --max_steps 158945 "
        "--warmup_steps 0.02",
    ),
}


def recipe(name: str, *words: str) -> TrainArguments:
    path = RECIPES / f"{name}.yaml"
    stated = {line.partition(":")[0] for line in path.read_text(encoding="utf-8").splitlines()}
    stated |= {"model_name_or_path"} if "config_name" in stated else set()
    given = [f"--{key}={value}" for key, value in GIVEN.items() if key not in stated]
    return read_arguments("train", [str(path), *given, *words])


def of_run(name: str, *words: str) -> TrainArguments:
    """Return the arguments of a run."""
    file, changes = RUNS[name]
    return recipe(file, *changes.split(), *words)


@pytest.mark.parametrize("name", RUNS)
def test_a_recipe_names_the_words_of_its_other_runs(name):
    file, changes = RUNS[name]
    text = (RECIPES / f"{file}.yaml").read_text(encoding="utf-8")
    for key, value in zip(*[iter(changes.split())] * 2, strict=True):
        # The comments name several configs after one key.
        assert (value.rpartition("/")[2] if key == "--config_name" else f"{key} {value}") in text, key


def test_no_recipe_goes_unchecked():
    assert SIZES.keys() == RUNS.keys()
    assert {file for file, _ in RUNS.values()} | {"demo"} == set(NAMES)
    recipe("demo")


# Of each run by its paper: sequences of a step, tokens of the run, steps of the warm-up, and the rate of all but memories.
SIZES = {
    "midus-hml": (64, 1.5e9, 1145, 1e-4),
    "midus-hml-8b": (64, 1.5e9, 1145, 5e-5),
    "hier-ffn": (1024, 2**40, 5002, 1e-4),
    **dict.fromkeys(("olmo2-669m", "moda-706m"), (1024, 4e11, 2000, 3e-4)),
    **dict.fromkeys(("moda-74m", "moda-128m"), (1024, 1e11, 2000, 3e-4)),
    **dict.fromkeys(("moc-371m", "vanilla-148m", "vanilla-203m"), (1024, 9600 * 2**20, 250, 3e-4)),
    "ultramem-v2-227m-1.2b": (768, 5e11, 3179, 4e-4),
    "ultramem-v2-1b-7b": (1024, 1e12, 2504, 4e-4),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_run_has_the_sizes_of_its_paper(name):
    config, (sequences, tokens, warmup, rate) = of_run(name), SIZES[name]
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == sequences
    step = sequences * config.sequence_length
    assert abs(config.max_steps * step - tokens) <= step
    assert (config.get_warmup_steps(config.max_steps), config.learning_rate) == (warmup, rate)
    if config.config_name is not None:
        assert (config.model_name_or_path, config.config_name) == (None, f"configs/models/{name}.json")
        assert config.sequence_length <= model_config(name)["max_position_embeddings"]


def test_the_matched_baseline_trains_the_layers_that_llama_pro_copies_and_as_many_parameters():
    layers, added = LLAMA_3_2_1B["num_hidden_layers"], 8
    new_layers = place("llama-pro", layers, added)
    # In the numbering of the base: each new layer follows the one that it is a copy of.
    matched = [index - 1 - earlier for earlier, index in enumerate(new_layers)]
    assert f"--trainable {str(matched).replace(' ', '')}" in (RECIPES / "midus-hml.yaml").read_text()

    def empty_model(num_layers: int, **record):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(LlamaConfig(**{**LLAMA_3_2_1B, "num_hidden_layers": num_layers}))
        model.config.upscale = record
        return model

    new = set_trainable(empty_model(layers + added, trainable="new", new_layers=new_layers), "new")
    existing = set_trainable(empty_model(layers), matched)
    assert existing.parameters == new.parameters > 0
    assert existing.total_parameters == new.total_parameters - new.parameters


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_in_a_recipe_make_its_model_and_run_it(name):
    text, config = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8"), recipe(name)
    assert re.findall(r"^#   midus train (\S+)", text, flags=re.MULTILINE) == [f"configs/train/{name}.yaml"]
    made = re.findall(r"^#   upscale (.+) --output (\S+)$", text, flags=re.MULTILINE)
    assert [output for _, output in made] == (
        [] if config.model_name_or_path in ("m", None) else [config.model_name_or_path]
    )
    for arguments, _ in made:
        stated = dict(zip(*[iter(arguments.split())] * 2, strict=True))
        if "--config" in stated:
            upscaling = read_mapping(REPOSITORY / stated["--config"])
            stated = {"--base": upscaling["base"], "--method": upscaling["method"]}
        assert stated == {"--base": "meta-llama/Llama-3.2-1B", "--method": name}


# Parameters of the models, by the names of their recipes (appendix A.4.1).
PARAMETERS = {"moc-371m": 371_292_932, "vanilla-148m": 147_874_560, "vanilla-203m": 202_937_088}


# Recipes of Mixture-of-Depths Attention.
MODA = ("olmo2-669m", "moda-706m", "moda-74m", "moda-128m")


# Models whose parameters are those of the paper's table 7.
TABLE_7 = ("ultramem-v2-227m-1.2b", "ultramem-v2-1b-7b")


def model_config(name: str) -> dict[str, Any]:
    return json.loads((REPOSITORY / "configs" / "models" / f"{name}.json").read_text())


def test_every_config_has_a_recipe_that_is_tested():
    configs = {path.stem for path in (REPOSITORY / "configs" / "models").glob("*.json")}
    assert configs == {*PARAMETERS, *TABLE_7, *MODA}


@pytest.mark.parametrize("name", ["moc-371m", *MODA[1:], *TABLE_7])
def test_a_config_has_every_option_of_its_memory_written_out(name):
    config = model_config(name)
    (entry,) = config["memory"]
    layers = config["num_hidden_layers"]
    sizes = ModelSizes(hidden_size=config["hidden_size"], num_heads=config["num_attention_heads"], num_layers=layers)
    (read,) = read_memories([entry], sizes).entries
    assert entry == read.to_dict()
    assert read.layers == ((2, 6, 10, 14) if name == "moc-371m" else tuple(range(layers)))
    assert name != "moc-371m" or read.options == ChaptersOptions(**PAPER)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_model_has_the_papers_shape_and_parameters(name):
    """Table 5."""
    config = AutoConfig.from_pretrained(REPOSITORY / "configs" / "models" / f"{name}.json")
    assert config.rope_parameters["rope_theta"] == 100_000
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() == PARAMETERS[name]
    assert type(model).__name__ == config.architectures[0]


def sizes_in_millions(config: dict[str, Any]) -> tuple[float, float, float]:
    """Parameters that a token uses, with and without embeddings, and all of them but embeddings."""
    counts = count_parameters(config)
    sizes = (counts["activated"], counts["activated_without_embeddings"], counts["total_without_embeddings"])
    used, used_without, total_without = (size / 1e6 for size in sizes)
    return used, used_without, total_without


def test_the_smaller_model_has_the_parameters_of_table_7():
    """225 M of 1.18 B: what a token uses counts embeddings there, and the total does not, as in the table's row of OLMoE."""
    used, _, total = sizes_in_millions(model_config("ultramem-v2-227m-1.2b"))
    assert abs(used - 225) < 1 and round(total / 1e3, 2) == 1.18


def test_the_composite_model_has_what_a_token_uses_and_not_the_total():
    """1,079 M of 6.70 B, both without embeddings. With 528 keys, as the table says, the total is 6.21 B; with 552 it is 6.69 B."""
    config = model_config("ultramem-v2-1b-7b")
    _, used, total = sizes_in_millions(config)
    assert round(used) == 1079 and round(total / 1e3, 2) == 6.21
    assert round(100 * (1 - total / 6700), 1) == 7.2
    (entry,) = config["memory"]
    _, used, total = sizes_in_millions({**config, "memory": [{**entry, "n": 552}]})
    assert round(used) == 1080 and round(total / 1e3, 2) == 6.69


_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
QWEN2_5_0_5B = {
    **dict(zip(_SIZES, (896, 4864, 24, 14, 2, 151936), strict=True)),
    **{"model_type": "qwen2", "tie_word_embeddings": True, "torch_dtype": "bfloat16"},
}
GEMMA_3_270M = {
    **dict(zip(_SIZES, (640, 2048, 18, 4, 1, 262144), strict=True)),
    **{"model_type": "gemma3_text", "head_dim": 256, "torch_dtype": "bfloat16"},
}
# Id, config, and what table 2 prints of each: millions that are fetched, billions of the bank.
FETCHING_BASES = {
    "llama-3.2-1b": ("meta-llama/Llama-3.2-1B", LLAMA_3_2_1B, (102.2, 14.1)),
    "qwen2.5-0.5b": ("Qwen/Qwen2.5-0.5B", QWEN2_5_0_5B, (43.4, 11.1)),
    "gemma-3-270m": ("google/gemma-3-270m", GEMMA_3_270M, (23.2, 5.9)),
}


@pytest.mark.parametrize("name", FETCHING_BASES)
def test_a_model_has_the_sizes_of_table_2(name, tmp_path):
    base, config, (fetched, bank) = FETCHING_BASES[name]
    path = UPSCALING / "hier-ffn.yaml"
    recipe, text = read_mapping(path), path.read_text(encoding="utf-8")
    options = recipe["options"]
    if base != recipe["base"]:
        assert base in text and "--set sizes=[512,128,32,0]" in text
        options = {**options, "sizes": [512, 128, 32, 0]}
    folder = write_config(tmp_path / "base", config)
    counts = upscale(base=folder, method=recipe["method"], options=options, dry_run=True).parameters
    assert counts.new == 0 and counts.trainable == counts.bank
    assert (round(counts.fetched / 1e6, 1), round(counts.bank / 1e9, 1)) == (fetched, bank)
