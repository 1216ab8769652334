"""What models compute whose chapters were edited: upscaled with `moc`, given values as training would, edited, loaded."""

import shutil

import pytest
import torch
from models.fresh_process import run_python
from tiny import prompt

from midus_hf.look.parts import zero_chapters
from midus_hf.ops.chapters.quantisation import dequantise_rows, quantise_rows
from tests.upscalers.checkpoints import load, logits, read_tensors, save_base, write_tensors
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

CHAPTERS, TOKENS = 6, 4
OPTIONS = {"memory_tokens": CHAPTERS * TOKENS, "chapters": CHAPTERS, "k": 2, "chunk_size": 4, "layers": [0, 2, 3]}
SHARES = (
    {},
    {"share": "none"},
    {"share": "every:2", "bank_rank": 3},
    {"routing": "prompt", "weighting": "logit_bias"},
)


def make(folder, **options):
    """A model whose memories have values, of float64, in which a sum in another order differs by little."""
    base = save_base(folder / "base", dtype=torch.float64)
    upscale(base=base, method="moc", options={**OPTIONS, **options}, output=folder / "model", verify=False)
    give_values(folder / "model")
    return folder / "model"


@pytest.fixture(params=SHARES, ids=str, scope="module")
def trained(request, tmp_path_factory):
    """Such a model, made once; nobody may change it."""
    return make(tmp_path_factory.mktemp("trained"), **request.param)


def give_values(folder, never_chosen=()):
    """Random values for all that memories have; chapters that no router chooses, if any."""
    tensors, generator = read_tensors(folder), torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if ".memor" in name:
            tensors[name] = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        if name.endswith("router_bias"):
            tensors[name][list(never_chosen)] = -1e6
    write_tensors(folder, tensors)


def same(left, right):
    return torch.allclose(left, right, rtol=1e-10, atol=1e-10)


def test_an_edited_checkpoint_is_the_model_that_was_edited_in_memory(tmp_path, chapters, trained):
    assert chapters("zero", trained, "--chapters", "0,3", "--output", tmp_path / "zero").status == 0
    model = load(trained)
    with zero_chapters(model, [0, 3]), torch.no_grad():
        assert torch.equal(model(prompt()).logits, logits(tmp_path / "zero"))


def test_a_chapter_that_is_never_chosen_is_pruned_without_a_trace(tmp_path, chapters, trained):
    trained = shutil.copytree(trained, tmp_path / "model")
    give_values(trained, never_chosen=[3])
    expected = logits(trained)
    assert chapters("prune", trained, "--chapters", "3", "--output", tmp_path / "pruned").status == 0
    assert same(logits(tmp_path / "pruned"), expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_rounded_model_computes_what_rounded_rows_give(tmp_path, chapters, bits):
    model = make(tmp_path)
    assert chapters("quantise", model, "--bits", bits, "--output", tmp_path / "out").status == 0
    assert strip(tmp_path / "out", tmp_path / "stripped")["base_confirmed"]
    tensors, usual = read_tensors(model), logits(model)
    bank = tensors["model.memory_tables.chapters.0.bank"]
    bank.copy_(dequantise_rows(*quantise_rows(bank, bits), bits, bank.dtype))
    write_tensors(model, tensors)
    assert same(logits(tmp_path / "out"), logits(model)) and not same(logits(model), usual)


def test_an_edited_model_loads_with_the_code_that_came_along(tmp_path, chapters):
    assert chapters("prune", make(tmp_path), "--chapters", "0,3", "--output", tmp_path / "out").status == 0
    torch.save((prompt(), logits(tmp_path / "out")), tmp_path / "expected.pt")
    code = """
from transformers import AutoModelForCausalLM
tokens, expected = torch.load("expected.pt")
print(torch.allclose(AutoModelForCausalLM.from_pretrained("out", trust_remote_code=True)(tokens).logits, expected, atol=1e-5))
"""
    assert run_python(code, tmp_path, package_present=False).split() == ["True"]
