"""Memories are upscaled onto types that no table describes: exactly, back again, and on one another."""

import itertools
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from models.test_every_type import TYPES, refusal_of
from pairs import by_default, taking_turns

from midus_hf.config.backbone import PROVEN
from midus_hf.models.inference.architecture import architecture_of
from midus_hf.models.inference.proof import prove, with_more_heads
from midus_hf.models.inference.tiny import tiny_model
from scripts.families import methods_on_the_page
from tests.upscalers.checkpoints import (
    config_of,
    edit_config,
    load,
    logits,
    long_prompt,
    same_tensors,
)
from tests.upscalers.methods import SMALL_CHAPTERS, SMALL_TABLES, SMALL_TREE, memory_ids
from upscalers.record.report import UpscaleReport
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

# In an order in which methods and the types of SAMPLE, in turn, fit.
OPTIONS: dict[str, dict[str, Any]] = {
    "moc": SMALL_CHAPTERS,
    "ultramem-v2": SMALL_TABLES,
    "midus-hml": {"n": 8, "k": 3},
    "moda": {},
    "hier-kv": SMALL_TREE,
    "hier-ffn": SMALL_TREE,
    "hier-lora-ffn": SMALL_TREE,
    "hier-lora-vo": SMALL_TREE,
    "midus-pkm": {"n": 8, "k": 3},
    "hier-lora-qk": SMALL_TREE,
    "midus-linear": {"slots": 16, "k": 3},
    "engram": {"rows": 101, "width": 16},
}
# What is proven for a method: its memory's site, or its memory's type inside a part.
WIRINGS = {
    "moc": "behind-attention",
    "ultramem-v2": "beside-ffn",
    "engram": "beside-ffn",
    "hier-ffn": "beside-ffn",
    **{name: name for name in ("hier-kv", "hier-lora-qk", "hier-lora-vo", "hier-lora-ffn")},
    "moda": "depth-attention",
}
# Linear attention, shared keys and values, experts in two layouts, a parallel layer, fused projections, latent attention, Mamba.
SAMPLE = ["qwen3_5_text", "gemma4_text", "gpt_oss", "mixtral", "cohere", "phi3", "deepseek_v3", "bamba"]
INFERRED = [model_type for model_type in TYPES if model_type not in PROVEN]
PRESENT = [model_type for model_type in SAMPLE if model_type in INFERRED]

# Each method on one type, and depth attention where some layers do not rotate queries and keys.
IN_TURN = [(model_type, method) for method, model_type in taking_turns(OPTIONS, PRESENT)] if PRESENT else []
IN_TURN += [("smollm3", "moda")] if "smollm3" in INFERRED else []

OF_ALL = list(itertools.product(INFERRED, OPTIONS))


class Made(NamedTuple):
    """A base, what a method made of the base, and the report; nobody may change them."""

    base: Path
    output: Path
    report: UpscaleReport


def options_of(model_type: str, method: str) -> dict[str, Any]:
    """Return small options of a method, with a site that the type has."""
    adds = all(parts.adds_mixer for parts in architecture_of(model_type).layers.values())
    return {**OPTIONS[method], **({"site": "behind-layer"} if method == "moc" and not adds else {})}


@pytest.fixture(scope="module")
def make(shared_base, tmp_path_factory):
    """Upscale a tiny checkpoint of a type, once; skip what the type's layers have no part for."""

    @cache
    def made(model_type: str, method: str) -> Made:
        if refusal_of(model_type) is not None:
            pytest.skip("the type is refused, as tests/models/test_every_type.py says")
        options = options_of(model_type, method)
        try:
            prove(model_type, options.get("site", WIRINGS.get(method, "inserted")))
        except ValueError:
            pytest.skip("the type's layers have no part for the memory, as tests/models/test_every_type.py says")
        base = shared_base(model_type, **(with_more_heads(model_type) if method == "moda" else {}))
        output = tmp_path_factory.mktemp("made") / f"{model_type.replace('-', '_')}_{method}"
        if method not in methods_on_the_page(model_type):
            pytest.skip("the method does not take the type, as docs/families.md says")
        report = upscale(base=base, output=output, method=method, options=options)
        return Made(base, output, report)

    return made


@pytest.mark.parametrize(("model_type", "method"), by_default(IN_TURN, OF_ALL))
def test_the_result_computes_and_generates_what_the_base_computes_and_is_stripped(model_type, method, make, tmp_path):
    made = make(model_type, method)
    base, model = load(made.base), load(made.output)
    assert made.report.promises_identity and made.report.identity.max_abs_diff == 0.0
    assert type(model).__name__ == f"Midus{type(base).__name__}" and model.config.model_type == f"midus_{model_type}"
    settings = {"max_new_tokens": 5, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    with torch.no_grad():
        expected = base(long_prompt()).logits
        assert torch.equal(model(long_prompt()).logits, expected)
        assert torch.equal(model(long_prompt(), **memory_ids(model)).logits, expected)
    assert torch.equal(model.generate(long_prompt(), **settings), base.generate(long_prompt(), **settings))
    result = strip(made.output, tmp_path / "stripped")
    assert result["base_confirmed"] is True and result["differing_tensors"] == 0
    assert same_tensors(made.base, tmp_path / "stripped") and config_of(made.base) == config_of(tmp_path / "stripped")


# Type, what its tiny model and its config differ in, words of the command, and what is said.
REFUSED = [
    ("mixtral", {}, {"num_attention_heads": "four"}, "ultramem-v2",
     "config has num_attention_heads = 'four'; expected a positive integer"),
    ("mixtral", {}, {"rms_norm_eps": "small"}, "ultramem-v2", "transformers cannot build the model that config.json describes"),
    ("mixtral", {}, {"quantization_config": {"quant_method": "mxfp4"}}, "ultramem-v2",
     r"the base is quantised \(quantization_config: mxfp4\)"),
    # Values of another width than keys, which the tiny model of the proof does not have.
    ("mimo_v2_flash", {"v_head_dim": 4, "head_dim": 8}, {}, "hier-kv",
     r"no layer of the base has the projections that hier-kv needs; expected key from 32 to 16, value from 32 to 16, "
     r"output_projection from 32 to 32, as config\.json says\. Choose another method\."),
    ("mixtral", {}, {}, "hier-lora-ffn",
     r"model_type 'mixtral' takes no memory of type '\S+' at the site 'inside-ffn' \(its proof .*every layer of 'mixtral' has no "
     r"part for a memory at the site 'inside-ffn'.*\)\. Choose one of .*, ultramem-v2 \(docs/families\.md\)\."),
    ("qwen3_5_text", {}, {}, "hier-kv --set layers=[0]", r"layers is \[0\]; expected .* of the base that have the projections: 3\."),
    ("cohere", {}, {}, "moc --set chapters=8 --set k=2",
     r"model_type 'cohere' takes no memory of type 'chapters' at the site 'behind-attention' .*: layer 0 of class Cohere"
     r".* Pass --set site=behind-layer, or choose one of .*midus-hml"),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "sizes", "changes", "words", "message"), REFUSED)
def test_a_checkpoint_that_a_memory_does_not_fit_is_refused(
    model_type, sizes, changes, words, message, command, tmp_path, refused
):
    tiny_model(model_type, **sizes).save_pretrained(tmp_path / "base")
    edit_config(tmp_path / "base", **changes)
    outcome = command("--base", tmp_path / "base", "--output", tmp_path / "out", "--method", *words.split())
    refused(outcome, message, left=["base"])


@pytest.mark.parametrize(
    ("model_type", "method", "options", "layers"),
    [("qwen3_5_text", "hier-kv", SMALL_TREE, [3]), ("cohere", "moc", {**SMALL_CHAPTERS, "site": "behind-layer"}, [2])],
)
def test_layers_that_have_the_part_take_the_memory(model_type, method, options, layers, shared_base, tmp_path):
    upscale(base=shared_base(model_type), method=method, options=options, output=tmp_path / "out", verify=False)
    assert config_of(tmp_path / "out")["memory"][0]["layers"] == layers


def test_a_block_without_output_projection_is_loaded_by_a_family_that_draws_this_projection(shared_base, tmp_path):
    base = shared_base("nanochat")
    upscale(base=base, method="midus-hml", options=OPTIONS["midus-hml"], output=tmp_path / "out", verify=False)
    assert torch.equal(*(logits(folder, input_ids=long_prompt()) for folder in (tmp_path / "out", base)))
