"""The recipes in `configs/train` are read, say what papers and releases say, and fit what makes their models."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import by_default
from training.outcomes import logged
from training.tiny_run import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from midus_hf import models  # noqa: F401 - registers the families that host memory
from midus_hf.cli.flops import count_parameters
from midus_hf.cli.train import read_arguments
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.config.yaml_options import read_mapping
from midus_hf.memories.chapters.options import PAPER, ChaptersOptions
from midus_hf.memories.entries import read_memories
from midus_hf.memories.ultramem.options import UltraMemOptions
from midus_hf.training.arguments import TrainArguments
from midus_hf.training.optim.freezing import set_trainable
from midus_hf.training.run import train
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
    assert SETTINGS.keys() == RUNS.keys()
    assert {file for file, _ in RUNS.values()} | {"demo", "hier-ffn"} == set(NAMES)
    recipe("demo")


# Settings of the runs by their papers, "sequences" of a step and "tokens" of the run among them.
_MIDUS = {  # appendix B; the first row of table 9, 1e-4 and 1e-6, is the row of MIDUS-HML in table 1
    **{"key_value_learning_rate": None, "weight_decay": 1e-6, "trainable": "auto"},
    **{"lr_scheduler_type": "cosine", "warmup_steps": 0.1, "sequence_length": 2048, "sequences": 64, "tokens": 1.5e9},
}
_MODA = {  # section 4: 2,000 steps up to 3e-4 and a cosine down to 3e-5
    **{"trainable": "all", "sequences": 1024, "learning_rate": 3e-4, "lr_scheduler_type": "cosine_with_min_lr"},
    **{"lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "weight_decay": 0.1, "adam_beta2": 0.95, "max_grad_norm": 1.0},
    "max_steps": int(4e11 / 1024 / 4096),
}
_CHAPTERS = {  # table 6
    **{"tokenizer_name": "HuggingFaceTB/SmolLM2-135M", "trainable": "all", "sequence_length": 1024, "sequences": 1024},
    **{"learning_rate": 3e-4, "weight_decay": 0.1, "adam_beta2": 0.95, "max_grad_norm": 1.0, "max_steps": 9600},
    **{"activation_checkpointing": True, "lr_scheduler_type": "warmup_stable_decay", "warmup_steps": 250},
    "lr_scheduler_kwargs": {"num_decay_steps": 9600 - 8160, "min_lr_ratio": 0.1},
}
_NO_MEMORY = dict.fromkeys(("memory_learning_rate", "value_learning_rate", "value_schedule"))
_ULTRAMEM = {  # of the release
    **{"learning_rate": 4e-4, "value_learning_rate": 4e-4, "value_schedule": "4x-to-1x", "memory_keys": "weights"},
    **{"weight_decay": 0.1, "value_weight_decay": 0.1, "lr_scheduler_type": "cosine_with_min_lr", "adam_beta2": 0.95},
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
}
SETTINGS = {
    "midus-hml": {"learning_rate": 1e-4, **_MIDUS},
    "midus-hml-8b": {"learning_rate": 5e-5, **_MIDUS},
    **dict.fromkeys(("olmo2-669m", "moda-706m", "moda-74m", "moda-128m"), _MODA),
    **{key: {**_CHAPTERS, **_NO_MEMORY, "value_weight_decay": 0} for key in ("vanilla-148m", "vanilla-203m")},
    "moc-371m": {
        **_CHAPTERS,
        **{"memory_learning_rate": 6e-4, "value_learning_rate": 6e-4, "value_schedule": "fixed"},
        "value_weight_decay": 0.1,
    },
    "ultramem-v2-227m-1.2b": {**_ULTRAMEM, "sequences": 768, "tokens": 5e11},
    "ultramem-v2-1b-7b": {**_ULTRAMEM, "sequences": 1024, "tokens": 1e12},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_has_the_settings_of_its_paper(name):
    config, settings = of_run(name), dict(SETTINGS[name])
    sequences = settings.pop("sequences")
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == sequences
    tokens = settings.pop("tokens", None)
    if tokens is not None:
        assert 0 <= tokens - config.max_steps * sequences * config.sequence_length < sequences * config.sequence_length
    assert {key: getattr(config, key) for key in settings} == settings
    if config.config_name is not None:
        assert (config.model_name_or_path, config.config_name) == (None, f"configs/models/{name}.json")
    if name in MODA:
        assert config.sequence_length == model_config(name)["max_position_embeddings"]
        assert config.get_warmup_steps(config.max_steps) == 2000
    if name in TABLE_7:
        assert abs(config.warmup_steps * tokens - 1e10) < 6e8


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


# Rows of the paper's table 7: layers, hidden size, heads, and n, D_k, k, D_v and D_p of the memory.
TABLE_7 = {
    "ultramem-v2-227m-1.2b": {"layers": 20, "hidden": 768, "heads": 12, "n": 360, "key": 192, "k": 32, "value": 192, "pre": 192},
    "ultramem-v2-1b-7b": {"layers": 16, "hidden": 2048, "heads": 16, "n": 528, "key": 512, "k": 128, "value": 768, "pre": 384},
}  # fmt: skip


def model_config(name: str) -> dict[str, Any]:
    return json.loads((REPOSITORY / "configs" / "models" / f"{name}.json").read_text())


def test_every_config_has_a_recipe_that_is_tested():
    configs = {path.stem for path in (REPOSITORY / "configs" / "models").glob("*.json")}
    assert configs == set(PARAMETERS) | set(TABLE_7) | set(MODA)


@pytest.mark.parametrize("name", MODA[1:])
def test_configs_of_attention_over_the_depth_write_every_option_out(name):
    config = model_config(name)
    (entry,) = config["memory"]
    sizes = ModelSizes(hidden_size=config["hidden_size"], num_heads=16, num_layers=config["num_hidden_layers"])
    (read,) = read_memories([entry], sizes).entries
    assert entry == read.to_dict() and read.layers == tuple(range(config["num_hidden_layers"]))


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_model_has_the_papers_shape_and_parameters(name):
    """Table 5."""
    config = AutoConfig.from_pretrained(REPOSITORY / "configs" / "models" / f"{name}.json")
    assert config.num_hidden_layers == (24 if name == "vanilla-203m" else 16)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (768, 2304, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads) == (12, 4)
    assert (config.rope_parameters["rope_theta"], config.tie_word_embeddings) == (100_000, True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() == PARAMETERS[name]
    assert type(model).__name__ == config.architectures[0]


def test_the_memory_is_the_papers_with_every_option_written_out():
    (entry,) = model_config("moc-371m")["memory"]
    sizes = ModelSizes(hidden_size=768, num_heads=12, num_layers=16)
    (read,) = read_memories([entry], sizes).entries
    assert entry == read.to_dict()
    assert read.options == ChaptersOptions(**PAPER)
    assert (read.site, read.layers) == ("behind-attention", (2, 6, 10, 14))


def sizes_in_millions(config: dict[str, Any]) -> tuple[float, float, float]:
    """Parameters that a token uses, with and without embeddings, and all of them but embeddings."""
    counts = count_parameters(config)
    sizes = (counts["activated"], counts["activated_without_embeddings"], counts["total_without_embeddings"])
    used, used_without, total_without = (size / 1e6 for size in sizes)
    return used, used_without, total_without


@pytest.mark.parametrize("name", TABLE_7)
def test_a_config_has_the_row_of_its_table_with_every_option_written_out(name):
    config, row = model_config(name), TABLE_7[name]
    (entry,) = config["memory"]
    sizes = ModelSizes(hidden_size=row["hidden"], num_heads=row["heads"], num_layers=row["layers"])
    (read,) = read_memories([entry], sizes).entries
    assert entry == read.to_dict()
    assert read.options == UltraMemOptions(
        n=row["n"], k=row["k"], key_width=row["key"], value_width=row["value"], pre_value_width=row["pre"], zero="none"
    )
    assert (read.site, read.layers) == ("beside-ffn", tuple(range(row["layers"])))
    assert (config["num_hidden_layers"], config["hidden_size"]) == (row["layers"], row["hidden"])
    assert config["num_attention_heads"] == config["num_key_value_heads"] == row["heads"]


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


SMALL_MEMORIES = {
    "chapters": {"memory_tokens": 32, "chapters": 8, "k": 2},
    "ultramem": {"n": 8, "k": 4, "key_width": 6, "value_width": 12, "pre_value_width": 4, "layers": [0, 1]},
}


@pytest.mark.parametrize("name", by_default(["moc-371m", "ultramem-v2-1b-7b"], [*PARAMETERS, *TABLE_7]))
def test_a_small_copy_trains(name, corpus, tmp_path):
    small = {**model_config(name), "vocab_size": 128, "hidden_size": 48, "intermediate_size": 64, "head_dim": 4}
    for entry in small.get("memory", []):
        entry |= SMALL_MEMORIES[entry["type"]]
    if name in TABLE_7:
        small["num_hidden_layers"] = 2
    (tmp_path / "config.json").write_text(json.dumps(small))
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    options = {
        **{
            "config_name": tmp_path / "config.json",
            "tokenizer_name": tmp_path / "tokenizer",
            "output_dir": tmp_path / "out",
        },
        **{"corpus": corpus, "corpus_split": "null", "sequence_length": 16, "bf16": "false"},
        **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 3, "logging_steps": 1},
        **{"warmup_steps": 0.1, "lr_scheduler_type": "cosine", "lr_scheduler_kwargs": "null"},
    }
    overrides = [f"--{key}={value}" for key, value in options.items()]
    assert train(of_run(name, *overrides)).steps == 3
    assert len(logged(tmp_path / "out")) == 3
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    started_at_zero = [tensor for key, tensor in trained.items() if key.endswith("output_projection.weight")]
    assert len(started_at_zero) == (4 if name == "moc-371m" else 0)
    assert all(tensor.any() for tensor in started_at_zero)


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


def test_the_run_of_fetching_models_has_the_papers_settings():
    """Appendices A.2 and A.6."""
    config = recipe("hier-ffn")
    assert (config.model_name_or_path, config.path_column) == ("llama-3.2-1b-hier", "memory_ids")
    assert (config.trainable, config.generic_share, config.document_mask) == ("new", 0, False)
    assert (config.value_learning_rate, config.value_schedule, config.value_weight_decay) == (1e-4, "fixed", 1e-3)
    assert (config.adam_beta2, config.max_grad_norm) == (0.95, 1.0)
    assert config.value_learning_rate * config.lr_scheduler_kwargs["min_lr_rate"] == pytest.approx(1e-5)
    tokens_per_step = config.sequence_length * config.per_device_train_batch_size * config.gradient_accumulation_steps
    assert (tokens_per_step, tokens_per_step * config.max_steps) == (2**21, 2**40)
    assert round(config.warmup_steps * config.max_steps, -2) == 5000
