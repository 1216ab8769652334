"""Edits of chapters change the rows that they name, and no other byte."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.upscalers.checkpoints import config_of, edit_config, read_tensors, same_bits, write_tensors
from tests.upscalers.edits.made import (
    CHAPTERS,
    LAYERS,
    TOKENS,
    bank_name,
    options,
    router_names,
    rows,
    save_chapters,
)
from upscalers.checkpoint.safetensors_format import read_header

TWO = ("chapters", "chapters-2")
INTEGERS = ("_integers", "_scales")
ONE_ZERO = [None, *range(1, CHAPTERS)]


@dataclass(frozen=True)
class Edit:
    """A command, and what it makes of a model.

    Args:
        words: The command, without model and output.
        order: For each chapter of the result the one that it was, None where its rows are zero.
        routers: Layers whose routers follow.
        saved: How the model differs from the usual.
        banks: What is edited.
        parts: Ends of the names of a bank's tensors.
    """

    words: str
    order: list[int | None]
    routers: tuple[int, ...] = ()
    saved: dict[str, Any] = field(default_factory=dict)
    banks: tuple[str, ...] = (bank_name(),)
    parts: tuple[str, ...] = ("",)


EDITS = {
    "zero": Edit("zero --chapters 1,3-4", [0, None, 2, None, None, 5]),
    "zero, bfloat16": Edit("zero --chapters 1,3-4", [0, None, 2, None, None, 5], saved={"dtype": torch.bfloat16}),
    "zero, float16": Edit("zero --chapters 1,3-4", [0, None, 2, None, None, 5], saved={"dtype": torch.float16}),
    "prune": Edit("prune --chapters 2,4", [0, 1, 3, 5], LAYERS),
    "prune the shared one": Edit("prune --chapters 5,0", [1, 2, 3, 4], LAYERS),
    "factors": Edit("zero --chapters 0", ONE_ZERO, saved={"bank_rank": 3}),
    "narrow": Edit("zero --chapters 0", ONE_ZERO, saved={"bank_width": 16, "heads": 2}),
    "none shared": Edit("zero --chapters 0", ONE_ZERO, saved={"shared_chapters": 0}),
    "prune factors": Edit("prune --chapters 1", [0, 2, 3, 4, 5], LAYERS, {"bank_rank": 3}),
    "zero, 8 bits": Edit("zero --chapters 0", ONE_ZERO, saved={"bank_bits": 8}, parts=INTEGERS),
    "zero, 4 bits": Edit("zero --chapters 0", ONE_ZERO, saved={"bank_bits": 4}, parts=INTEGERS),
    "one bank": Edit("zero --chapters 0 --bank 1", ONE_ZERO, (), {"share": "every:2"}, (bank_name(1),)),
    "every bank": Edit(
        "zero --chapters 0", ONE_ZERO, (), {"share": "none"},
        tuple(f"model.layers.{layer}.memories.chapters.bank" for layer in LAYERS),
    ),
    "one memory": Edit(
        "zero --chapters 0 --memory chapters-2", ONE_ZERO, (), {"names": TWO}, (bank_name(memory="chapters-2"),)
    ),
    "no prefix": Edit("prune --chapters 1", [0, 2, 3, 4, 5], LAYERS, {"prefix": ""}),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_moves_the_rows_that_it_names_and_nothing_else(tmp_path, edited, name):
    edit = EDITS[name]
    model = save_chapters(tmp_path / "model", **edit.saved)
    verb, *words = edit.words.split()
    output = edited(verb, model, *words)
    prefix = edit.saved.get("prefix", "model.")
    before, after = (
        {
            f"model.{key.removeprefix(prefix)}" if "memor" in key else key: tensor
            for key, tensor in read_tensors(folder).items()
        }
        for folder in (model, output)
    )
    of_banks = {bank + part for bank in edit.banks for part in edit.parts}
    of_routers = {router for layer in edit.routers for router in router_names(layer)}
    assert before.keys() == after.keys()
    changed = {key for key in before if not same_bits(before[key], after[key])}
    assert changed == of_banks | of_routers
    for key in of_banks:
        zeros = torch.zeros_like(before[key][rows(0)])
        expected = [zeros if number is None else before[key][rows(number)] for number in edit.order]
        assert same_bits(after[key], torch.cat(expected)), key
    for key in of_routers:
        assert same_bits(after[key], before[key][edit.order]), key
    entries, expected = config_of(output)["memory"], config_of(model)["memory"]
    if verb == "prune":
        expected[0] |= {
            "chapters": len(edit.order),
            "memory_tokens": len(edit.order) * TOKENS,
            "shared_chapters": edit.order.count(0),
        }
    assert entries == expected


def test_shards_stay_and_are_indexed(tmp_path, edited):
    model = save_chapters(tmp_path / "model", sharded=True)
    output, index = edited("prune", model, "--chapters", "3"), "model.safetensors.index.json"
    weight_map = json.loads((output / index).read_text())["weight_map"]
    assert weight_map == json.loads((model / index).read_text())["weight_map"]
    assert {file.name for file in output.glob("*.safetensors")} == set(weight_map.values())
    for name, file in weight_map.items():
        assert name in read_header(output / file)


def test_what_is_not_finite_stays_as_it_is(tmp_path, edited):
    model = save_chapters(tmp_path / "model")
    tensors = read_tensors(model)
    tensors[bank_name()][0] = float("nan")
    write_tensors(model, tensors)
    after = read_tensors(edited("zero", model, "--chapters", "1"))
    assert same_bits(after[bank_name()][rows(0)], tensors[bank_name()][rows(0)])


def test_what_lies_beside_the_weights_comes_along(edited, checkpoint):
    output = edited("zero", checkpoint, "--chapters", "1")
    for name in ("tokenizer.json", "generation_config.json", "modeling_midus.py"):
        assert (output / name).read_bytes() == (checkpoint / name).read_bytes()
    assert {file.name for file in output.iterdir()} == {file.name for file in checkpoint.iterdir()}


def test_the_result_is_told(tmp_path, chapters, checkpoint):
    done = chapters("prune", checkpoint, "--chapters", "2-3", "--output", tmp_path / "out", "--json").json()
    assert done.pop("seconds") > 0 and done.pop("bytes_written") > 0
    assert done == {
        "command": "prune",
        "model": str(checkpoint),
        "output": str(tmp_path / "out"),
        "memory": "chapters",
        "banks": [0],
        "chapters": [2, 3],
        "chapters_before": 6,
        "chapters_after": 4,
    }
    told = chapters("zero", tmp_path / "out", "--chapters", "2,3", "--output", tmp_path / "again").out
    assert told.endswith("zero, chapters 2-3 of memory chapters, bank 0; 4 chapters, before 4\n")


def test_an_output_of_ours_is_replaced_when_asked(tmp_path, chapters, edited, checkpoint):
    output = edited("zero", checkpoint, "--chapters", "1")
    done = chapters("zero", checkpoint, "--chapters", "2", "--output", output)
    assert done.status == 2 and f"output {output} exists; pass --overwrite" in done.err
    bank = read_tensors(edited("zero", checkpoint, "--chapters", "2", "--overwrite"))[bank_name()]
    assert bank[rows(1)].any() and not bank[rows(2)].any()


REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "unknown chapter": ("zero --chapters 6", "chapters is '6'; expected numbers from 0 to 5", {}),
    "chapter twice": ("zero --chapters 2,1-3", "chapters is '2,1-3', which names 2 twice", {}),
    "no numbers": ("prune --chapters three", "chapters is 'three'; expected numbers and ranges such as 3,7-9", {}),
    "range from behind": ("prune --chapters 4-2", "chapters is '4-2'; expected numbers and ranges", {}),
    "nothing": ("zero --chapters ,", "chapters is ','; expected numbers and ranges", {}),
    "too few left": (
        "prune --chapters 1-4", "chapters is '1-4', which leaves 1 chapters to choose k = 2 of; expected k or more. Prune fewer.", {}
    ),
    "unknown bank": ("zero --chapters 1 --bank 1", "bank is 1; expected a number from 0 to 0", {}),
    "unknown memory": (
        "zero --chapters 1 --memory other",
        "memory is 'other'; expected the name of a memory of chapters, of which the model has: chapters.",
        {},
    ),
    "which memory": (
        "zero --chapters 1", "the model has several memories of chapters, chapters, chapters-2; expected one of them", {"names": TWO}
    ),
    "one of several banks": (
        "prune --chapters 1 --bank 0",
        "bank is 0; expected no single bank to prune, since the 2 banks of memory 'chapters'",
        {"share": "every:2"},
    ),
    "width": ("quantise --bits 3", "bits is 3; expected 8 or 4.", {}),
    "odd rows": (
        "quantise --bits 4", "bank_bits is 4 and rows of the bank have 3 elements; expected an even number", {"bank_rank": 3}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_request_is_one_line_and_writes_nothing(tmp_path, refusal, checkpoint, case):
    words, message, saved = REFUSED[case]
    verb, *rest = words.split()
    assert message in refusal(verb, save_chapters(tmp_path / "model", **saved) if saved else checkpoint, *rest)


def test_a_model_without_chapters_is_refused(tmp_path, refusal):
    model = save_chapters(tmp_path / "model")
    edit_config(model, memory=[])
    assert "has no memory of type 'chapters'" in refusal("zero", model, "--chapters", "1")
    edit_config(model, memory=[{"type": "chapters", **options(), "layers": list(LAYERS)}], upscale=...)
    assert "was not made by upscale" in refusal("zero", model, "--chapters", "1")
