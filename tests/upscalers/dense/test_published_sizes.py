"""What dense methods make of the published models: the papers' parameter counts, and every recipe of `configs/upscale`."""

from pathlib import Path

import pytest
import yaml

from midus_hf.cli.upscale import RunRequest
from tests.upscalers.real_configs import LLAMA_3_1_8B, LLAMA_3_2_1B, write_config
from tests.upscalers.test_placements import TABLES
from upscalers.methods.contract import get_method
from upscalers.request.options import parse_options
from upscalers.runs.upscale import upscale

RECIPES = Path(__file__).parents[3] / "configs" / "upscale"
# Of hierarchical memories `tests/training/test_recipes.py` has the recipes.
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml") if not path.stem.startswith("hier-"))
BASES = {"meta-llama/Llama-3.2-1B": LLAMA_3_2_1B, "meta-llama/Llama-3.1-8B": LLAMA_3_1_8B}
SHORT_NAMES = {"llama-3.2-1b": "meta-llama/Llama-3.2-1B", "llama-3.1-8b": "meta-llama/Llama-3.1-8B"}

# Parameters that are new and in all, and what MIDUS says of them (tables 12 and 4): billions trained and in all.
COUNTS = {
    "meta-llama/Llama-3.2-1B": (486_572_032, 1_722_386_432, "0.49 / 1.72"),
    "meta-llama/Llama-3.1-8B": (3_489_792_000, 11_520_053_248, "3.49 / 11.52"),
}

DENSE = ["llama-pro", "solar", "avg-deus", "linear-combination", "attenuated-copy", "lesa", "opt-deus"]
# Methods that add no layers.
ATTACHING = ["moc", "moda", "ultramem-v2"]


@pytest.fixture(params=BASES)
def model(request, tmp_path):
    """The id of a published model, and a folder with its config."""
    return request.param, write_config(tmp_path / "base", BASES[request.param])


@pytest.mark.parametrize("method", DENSE)
def test_parameter_counts_are_those_of_the_papers(model, method):
    base_id, folder = model
    new, total, published = COUNTS[base_id]
    report = upscale(base=folder, method=method, dry_run=True)
    counts = report.parameters
    assert (counts.base, counts.new, counts.total) == (total - new, new, total)
    assert report.bytes.written == 2 * total, "bfloat16"
    assert report.num_layers == 3 * BASES[base_id]["num_hidden_layers"] // 2
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    if method == "solar":
        assert counts.trainable == total
        return
    assert counts.trainable == new
    assert f"{counts.trainable / 1e9:.2f} / {counts.total / 1e9:.2f}" == published


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_plans_half_as_many_new_layers_as_its_base_has_or_attaches_memory(name, tmp_path):
    recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text(encoding="utf-8"))
    parse_options(RunRequest, recipe, name)
    if name == "demo":
        assert "base" not in recipe and "output" not in recipe
        return
    method, base_id = next(
        (name.partition(f"-{short}")[0], SHORT_NAMES[short]) for short in SHORT_NAMES if short in name
    )
    assert recipe["base"] == base_id
    assert recipe["method"] == method.removesuffix("-release")
    folder = write_config(tmp_path / "base", BASES[base_id])
    report = upscale(**{**recipe, "base": folder, "output": None, "dry_run": True})
    layers = BASES[base_id]["num_hidden_layers"]
    if recipe["method"] in ATTACHING:
        assert (report.num_layers, report.new_layer_indices, report.promises_identity) == (layers, [], True)
        return
    assert (report.num_layers, len(report.new_layer_indices)) == (layers + layers // 2, layers // 2)
    if recipe["method"] not in ("solar", "slices"):
        assert report.new_layer_indices == TABLES[layers, layers // 2][recipe["placement"]]
    assert report.promises_identity == (
        recipe["method"].startswith("midus-") or recipe["method"] in ("llama-pro", "opt-deus")
    )


@pytest.mark.parametrize("name", [name for name in NAMES if "release" in name])
def test_a_recipe_of_a_release_is_the_preset_and_differs_from_the_methods_own(name):
    recipe, own = (
        yaml.safe_load((RECIPES / f"{stem}.yaml").read_text(encoding="utf-8"))
        for stem in (name, name.replace("-release", ""))
    )
    assert recipe["options"] == {"preset": "release"}
    options_class = get_method(recipe["method"]).options_class
    assert parse_options(options_class, recipe["options"], name) != parse_options(options_class, own["options"], name)


@pytest.mark.parametrize(
    "method", ["solar", "llama-pro", "avg-deus", "lesa", "opt-deus", "midus-hml", "midus-pkm", "midus-linear", "moc"]
)
@pytest.mark.parametrize("base", SHORT_NAMES)
def test_there_is_a_recipe_of_every_method_of_the_papers_for_both_bases(method, base):
    assert any(name.startswith(f"{method}-{base}") for name in NAMES)
