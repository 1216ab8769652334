"""What dense methods make of the published models: the papers' parameter counts, and every recipe of `configs/upscale`."""

from pathlib import Path

import pytest
import yaml

from midus_hf.cli.upscale import RunRequest
from tests.upscalers.real_configs import LLAMA_3_1_8B, LLAMA_3_2_1B, write_config
from tests.upscalers.test_placements import TABLES
from upscalers.request.options import parse_options
from upscalers.runs.upscale import upscale

RECIPES = Path(__file__).parents[3] / "configs" / "upscale"
# Of hierarchical memories `tests/training/test_recipes.py` has the recipes.
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml") if not path.stem.startswith("hier-"))
BASES = {"meta-llama/Llama-3.2-1B": LLAMA_3_2_1B, "meta-llama/Llama-3.1-8B": LLAMA_3_1_8B}

# Parameters that are new and in all, and what MIDUS says of them (tables 12 and 4): billions trained and in all.
COUNTS = {
    "meta-llama/Llama-3.2-1B": (486_572_032, 1_722_386_432, "0.49 / 1.72"),
    "meta-llama/Llama-3.1-8B": (3_489_792_000, 11_520_053_248, "3.49 / 11.52"),
}

DENSE = ["llama-pro", "solar", "avg-deus", "linear-combination", "attenuated-copy", "lesa", "opt-deus"]


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


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_plans_half_as_many_new_layers_as_its_base_has(name, base, tmp_path):
    recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text(encoding="utf-8"))
    parse_options(RunRequest, recipe, name)
    if name == "demo":
        assert "base" not in recipe and "output" not in recipe
        return
    assert (recipe["base"], recipe["method"]) == ("meta-llama/Llama-3.2-1B", name)
    folder = write_config(tmp_path / "base", BASES[base])
    report = upscale(**{**recipe, "base": folder, "dry_run": True})
    layers = BASES[base]["num_hidden_layers"]
    placement = "top-heavy" if name.endswith("-deus") else "distributed"
    assert report.new_layer_indices == TABLES[layers, layers // 2][placement]
    assert report.promises_identity == (name != "avg-deus")
