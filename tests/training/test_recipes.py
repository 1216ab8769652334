"""The recipes in `configs/train` are read, say what the paper says, and fit the recipes that make their models."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from midus_hf.config.yaml_options import read_config, read_mapping
from midus_hf.training.optim.freezing import set_trainable
from midus_hf.training.options import TrainConfig
from tests.upscalers.real_configs import LLAMA_3_1_8B, LLAMA_3_2_1B
from upscalers.plan.placements import place

REPOSITORY = Path(__file__).parents[2]
RECIPES, UPSCALING = REPOSITORY / "configs" / "train", REPOSITORY / "configs" / "upscale"
# Recipes that begin from a config: `test_pretraining_recipes.py`.
PRETRAINING = {path.stem for path in (REPOSITORY / "configs" / "models").glob("*.json")}
# Recipes of memories that texts fetch: `test_hierarchical_recipes.py`.
FETCHING = {path.stem for path in RECIPES.glob("hier-*.yaml")}
NAMES = sorted({path.stem for path in RECIPES.glob("*.yaml")} - PRETRAINING - FETCHING)
# What a recipe may leave to the command line.
GIVEN = {"model_name_or_path": "model_name_or_path=m", "output_dir": "output_dir=o", "corpus": "corpus=c"}

# Config, id and number of new layers (section 5.1) of the paper's bases.
BASES = {
    "llama-3.2-1b": (LLAMA_3_2_1B, "meta-llama/Llama-3.2-1B", 8),
    "llama-3.1-8b": (LLAMA_3_1_8B, "meta-llama/Llama-3.1-8B", 16),
}

# What the recipes of each method, and of the base itself, say of `trainable`.
TRAINABLE = {
    **dict.fromkeys(("midus-hml", "midus-pkm", "midus-linear", "moc", "moda", "ultramem-v2"), "new"),
    "base": "all",
    **dict.fromkeys(("solar", "llama-pro", "lesa", "opt-deus", "avg-deus"), "auto"),
}

# Learning rate and tokens of each recipe (appendix B).
RATES = {
    f"{method}-{base}{corpus}": (rate, tokens)
    for method in (*TRAINABLE, "matched")
    for base, corpus, rate, tokens in (
        ("llama-3.2-1b", "", 1e-4, 1.5e9),
        ("llama-3.1-8b", "", 5e-5, 1.5e9),
        ("llama-3.2-1b", "-mathpile", 1e-4, 1.1e9),
        ("llama-3.1-8b", "-mathpile", 1e-4, 1.1e9),
    )
    if not corpus or method == "midus-hml"
}


# What the paper's tables 7, 8, 10 and 11 change in MIDUS-HML at 1B; the last two are placements.
ABLATIONS = {
    "n16": {"n": 16},
    "n32": {"n": 32},
    "k1": {"k": 1},
    "k2": {"k": 2},
    "k8": {"k": 8},
    "batch-norm": {"query_norm": "batch"},
    "layer-norm": {"query_norm": "layer"},
    "residual": {"inner_residual": True},
    "output-projection": {"output_projection": True},
    "top-heavy": {},
    "bottom-heavy": {},
}


def recipe(name: str) -> TrainConfig:
    path = RECIPES / f"{name}.yaml"
    stated = {line.partition(":")[0] for line in path.read_text(encoding="utf-8").splitlines()}
    return read_config(TrainConfig, path, [word for key, word in GIVEN.items() if key not in stated])


def layers_that_llama_pro_copies(num_layers: int, num_new_layers: int) -> list[int]:
    """In the numbering of the base: each new layer follows the one that it is a copy of."""
    return [index - 1 - earlier for earlier, index in enumerate(place("llama-pro", num_layers, num_new_layers))]


def empty_model(config: dict, num_layers: int, **record):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**{**config, "num_hidden_layers": num_layers}))
    model.config.upscale = record
    return model


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_is_a_config(name):
    recipe(name)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("method", TRAINABLE)
def test_there_is_a_recipe_of_every_method_for_both_bases_and_it_trains_what_the_paper_trains(method, base):
    assert recipe(f"{method}-{base}").trainable == TRAINABLE[method]


@pytest.mark.parametrize("name", RATES)
def test_the_recipes_of_the_paper_have_its_hyperparameters(name):
    config, (rate, tokens) = recipe(name), RATES[name]
    assert (config.learning_rate, config.key_value_learning_rate) == (rate, None)
    assert (config.lr_scheduler_type, config.warmup_ratio, config.bf16) == ("cosine", 0.1, True)
    assert config.weight_decay in (0, 1e-6, 1e-2)
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 64
    assert config.sequence_length == 2048
    assert 0 <= tokens - config.max_steps * 64 * 2048 < 64 * 2048


def test_the_run_whose_decay_the_paper_names_has_it():
    """The first row of table 9, 1e-4 and 1e-6, is the row of MIDUS-HML in table 1."""
    config = recipe("midus-hml-llama-3.2-1b")
    assert (config.learning_rate, config.weight_decay, config.value_transforms) == (1e-4, 1e-6, "weights")


def test_no_recipe_goes_unchecked():
    assert {*RATES, "demo"} == set(NAMES)


@pytest.mark.parametrize("base", BASES)
def test_the_matched_baseline_trains_the_layers_that_llama_pro_copies_and_as_many_parameters(base):
    config, base_id, num_new_layers = BASES[base]
    num_layers = config["num_hidden_layers"]
    matched, pro = recipe(f"matched-{base}"), recipe(f"llama-pro-{base}")
    assert matched.trainable == layers_that_llama_pro_copies(num_layers, num_new_layers)
    assert matched.model_name_or_path == base_id

    expanded = empty_model(
        config,
        num_layers + num_new_layers,
        trainable="new",
        new_layers=place("llama-pro", num_layers, num_new_layers),
    )
    new = set_trainable(expanded, pro.trainable)
    existing = set_trainable(empty_model(config, num_layers), matched.trainable)
    assert existing.parameters == new.parameters > 0
    assert existing.total_parameters == new.total_parameters - new.parameters


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_in_a_recipe_make_its_model_and_run_it(name):
    text, config = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8"), recipe(name)
    run = re.findall(r"^#   midus train (\S+)", text, flags=re.MULTILINE)
    assert run == [f"configs/train/{name}.yaml"]
    made = re.findall(r"^#   upscale (.+) --output (\S+)$", text, flags=re.MULTILINE)
    bases = {base_id for _, base_id, _ in BASES.values()} | {"m"}
    assert [output for _, output in made] == (
        [] if config.model_name_or_path in bases else [config.model_name_or_path]
    )
    for arguments, _ in made:
        stated = dict(zip(*[iter(arguments.split())] * 2, strict=True))
        if "--config" in stated:
            upscaling = read_mapping(REPOSITORY / stated["--config"])
            stated = {"--base": upscaling["base"], "--method": upscaling["method"]}
        (base,) = (base for base in BASES if base in name)
        assert stated == {"--base": BASES[base][1], "--method": name.partition(f"-{base}")[0]}


def test_there_is_a_recipe_of_every_ablation_and_of_what_it_is_compared_with():
    names = {path.stem for path in UPSCALING.glob("midus-hml-llama-3.2-1b-*.yaml")}
    assert names == {f"midus-hml-llama-3.2-1b-{name}" for name in (*ABLATIONS, "distributed")}


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_an_ablation_changes_what_the_paper_changes_and_its_commands_train_it_as_midus_hml(ablation):
    path = UPSCALING / f"midus-hml-llama-3.2-1b-{ablation}.yaml"
    compared = read_mapping(UPSCALING / "midus-hml-llama-3.2-1b-distributed.yaml")
    changed = {"placement": ablation} if "heavy" in ablation else {}
    assert read_mapping(path) == {**compared, **changed, "options": {**compared["options"], **ABLATIONS[ablation]}}

    text = path.read_text(encoding="utf-8")
    made = re.findall(r"^#   upscale --config (\S+) --output (\S+)$", text, flags=re.MULTILINE)
    run = re.findall(r"^#   midus train (\S+) (.+)$", text, flags=re.MULTILINE)
    ((config, folder),), ((training, words),) = made, run
    assert REPOSITORY / config == path
    trained = dataclasses.asdict(read_config(TrainConfig, REPOSITORY / training, words.split()))
    of_midus = dataclasses.asdict(recipe("midus-hml-llama-3.2-1b"))
    own = {"model_name_or_path": folder, "output_dir": f"outputs/{path.stem}"}
    assert folder != of_midus["model_name_or_path"] and trained == {**of_midus, **own}


def test_recipes_of_one_base_and_corpus_differ_only_in_what_is_trained():
    for base in BASES:
        configs = [dataclasses.asdict(recipe(f"{method}-{base}")) for method in (*TRAINABLE, "matched")]
        for config in configs:
            for key in ("model_name_or_path", "output_dir", "trainable"):
                del config[key]
        assert all(config == configs[0] for config in configs)
