"""Edits of chapters change the rows that they name, and no other byte."""

import json

import pytest
import torch

from tests.upscalers.chapters.made import (
    CHAPTERS,
    HIDDEN,
    LAYERS,
    TOKENS,
    bank_name,
    options,
    router_names,
    rows,
    save_chapters,
)
from tests.upscalers.checkpoints import edit_config, read_tensors, same_bits, write_tensors
from upscalers.checkpoint.safetensors_format import read_header

OF_ROUTERS = {name for layer in LAYERS for name in router_names(layer)}


def memory_of(folder):
    (entry,) = json.loads((folder / "config.json").read_text())["memory"]
    return entry


def check_others(before, after, changed):
    """Every tensor but those is the same, bit for bit."""
    assert before.keys() == after.keys()
    assert {name for name in before if not same_bits(before[name], after[name])} == set(changed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_zero_sets_rows_to_zero(tmp_path, chapters, dtype):
    model = save_chapters(tmp_path / "model", dtype)
    assert chapters("zero", model, "--chapters", "1,3-4", "--output", tmp_path / "out").status == 0
    before, after = read_tensors(model), read_tensors(tmp_path / "out")
    check_others(before, after, [bank_name()])
    for number in range(CHAPTERS):
        own = before[bank_name()][rows(number)]
        expected = torch.zeros_like(own) if number in (1, 3, 4) else own
        assert same_bits(after[bank_name()][rows(number)], expected)
    assert memory_of(tmp_path / "out") == memory_of(model)


def test_swap_exchanges_rows_alone(tmp_path, chapters, checkpoint):
    assert chapters("swap", checkpoint, "--chapters", "2,5", "--output", tmp_path / "out").status == 0
    before, after = read_tensors(checkpoint), read_tensors(tmp_path / "out")
    check_others(before, after, [bank_name()])
    for number, other in {0: 0, 1: 1, 2: 5, 3: 3, 4: 4, 5: 2}.items():
        assert same_bits(after[bank_name()][rows(number)], before[bank_name()][rows(other)])


def test_swap_with_router_exchanges_all_that_a_chapter_has(tmp_path, chapters, checkpoint):
    words = ("swap", checkpoint, "--chapters", "5,2", "--with-router", "--output", tmp_path / "out")
    assert chapters(*words).status == 0
    before, after = read_tensors(checkpoint), read_tensors(tmp_path / "out")
    check_others(before, after, [bank_name(), *OF_ROUTERS])
    moved = [0, 1, 5, 3, 4, 2]
    for name in OF_ROUTERS:
        assert same_bits(after[name], before[name][moved])
    assert same_bits(after[bank_name()].unflatten(0, (CHAPTERS, -1)), before[bank_name()].view(6, TOKENS, -1)[moved])


def test_two_swaps_are_none(tmp_path, chapters, checkpoint):
    words = ("--chapters", "1,4", "--with-router", "--output")
    assert chapters("swap", checkpoint, *words, tmp_path / "once").status == 0
    assert chapters("swap", tmp_path / "once", *words, tmp_path / "twice").status == 0
    for file in ("model.safetensors", "tokenizer.json", "modeling_midus.py"):
        assert (tmp_path / "twice" / file).read_bytes() == (checkpoint / file).read_bytes()


@pytest.mark.parametrize(("pruned", "kept", "shared"), [("2,4", [0, 1, 3, 5], 1), ("5,0", [1, 2, 3, 4], 0)])
def test_prune_takes_chapters_out_and_the_config_follows(tmp_path, chapters, checkpoint, pruned, kept, shared):
    done = chapters("prune", checkpoint, "--chapters", pruned, "--output", tmp_path / "out")
    assert done.status == 0, done.err
    before, after = read_tensors(checkpoint), read_tensors(tmp_path / "out")
    changed = {bank_name(), *OF_ROUTERS}
    check_others(
        {name: tensor for name, tensor in before.items() if name not in changed},
        {name: tensor for name, tensor in after.items() if name not in changed},
        [],
    )
    assert same_bits(after[bank_name()], torch.cat([before[bank_name()][rows(number)] for number in kept]))
    for name in OF_ROUTERS:
        assert same_bits(after[name], before[name][kept])
    expected = {"chapters": 4, "memory_tokens": 4 * TOKENS, "shared_chapters": shared}
    assert memory_of(tmp_path / "out") == {**memory_of(checkpoint), **expected}


def test_shards_stay_and_are_indexed(tmp_path, chapters):
    model = save_chapters(tmp_path / "model", sharded=True)
    assert chapters("prune", model, "--chapters", "3", "--output", tmp_path / "out").status == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    assert {file.name for file in (tmp_path / "out").glob("*.safetensors")} == set(index["weight_map"].values())
    for name, file in index["weight_map"].items():
        assert name in read_header(tmp_path / "out" / file)


@pytest.mark.parametrize(
    ("changes", "width"),
    [({"bank_rank": 3}, 3), ({"bank_width": 16, "heads": 2}, 16), ({"shared_chapters": 0}, HIDDEN)],
    ids=["factors", "narrow", "none shared"],
)
def test_banks_of_every_form_are_edited(tmp_path, chapters, changes, width):
    model = save_chapters(tmp_path / "model", **changes)
    assert chapters("zero", model, "--chapters", "0", "--output", tmp_path / "zero").status == 0
    after = read_tensors(tmp_path / "zero")
    check_others(read_tensors(model), after, [bank_name()])
    assert after[bank_name()].shape == (CHAPTERS * TOKENS, width)
    assert not after[bank_name()][rows(0)].any() and after[bank_name()][rows(1)].any()
    assert chapters("prune", model, "--chapters", "1", "--output", tmp_path / "out").status == 0
    assert read_tensors(tmp_path / "out")[bank_name()].shape == ((CHAPTERS - 1) * TOKENS, width)


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_of_integers_are_edited_with_their_scales(tmp_path, chapters, bits):
    model = save_chapters(tmp_path / "model", bank_bits=bits)
    of_rows = [bank_name() + "_integers", bank_name() + "_scales"]
    assert chapters("zero", model, "--chapters", "2", "--output", tmp_path / "zero").status == 0
    before, after = read_tensors(model), read_tensors(tmp_path / "zero")
    check_others(before, after, of_rows)
    assert not any(after[name][rows(2)].any() for name in of_rows)
    assert chapters("swap", model, "--chapters", "2,3", "--output", tmp_path / "swapped").status == 0
    after = read_tensors(tmp_path / "swapped")
    check_others(before, after, of_rows)
    assert all(same_bits(after[name][rows(2)], before[name][rows(3)]) for name in of_rows)


def test_one_of_several_banks_is_edited(tmp_path, chapters):
    model = save_chapters(tmp_path / "model", share="every:2")
    words = ("swap", model, "--chapters", "1,2", "--with-router", "--bank", "1", "--output", tmp_path / "out")
    assert chapters(*words).status == 0
    of_layers = {name for layer in (2, 3) for name in router_names(layer)}
    check_others(read_tensors(model), read_tensors(tmp_path / "out"), {bank_name(1), *of_layers})


def test_without_a_bank_all_are_edited(tmp_path, chapters):
    model = save_chapters(tmp_path / "model", share="none")
    assert chapters("zero", model, "--chapters", "1", "--output", tmp_path / "out").status == 0
    banks = [f"model.layers.{layer}.memories.chapters.bank" for layer in LAYERS]
    check_others(read_tensors(model), read_tensors(tmp_path / "out"), banks)


def test_one_of_several_memories_is_edited(tmp_path, chapters):
    model = save_chapters(tmp_path / "model", names=("chapters", "chapters-2"))
    words = ("zero", model, "--chapters", "1", "--memory", "chapters-2", "--output", tmp_path / "out")
    assert chapters(*words).status == 0
    check_others(read_tensors(model), read_tensors(tmp_path / "out"), [bank_name(memory="chapters-2")])


def test_names_without_the_prefix_of_the_decoder_are_found(tmp_path, chapters):
    model = save_chapters(tmp_path / "model", prefix="")
    assert chapters("prune", model, "--chapters", "1", "--output", tmp_path / "out").status == 0
    assert read_tensors(tmp_path / "out")[bank_name().removeprefix("model.")].shape[0] == (CHAPTERS - 1) * TOKENS


def test_what_is_not_finite_stays_as_it_is(tmp_path, chapters):
    model = save_chapters(tmp_path / "model")
    tensors = read_tensors(model)
    tensors[bank_name()][0] = float("nan")
    write_tensors(model, tensors)
    assert chapters("swap", model, "--chapters", "0,1", "--output", tmp_path / "out").status == 0
    assert same_bits(read_tensors(tmp_path / "out")[bank_name()][rows(1)], tensors[bank_name()][rows(0)])


def test_what_lies_beside_the_weights_comes_along(tmp_path, chapters, checkpoint):
    assert chapters("zero", checkpoint, "--chapters", "1", "--output", tmp_path / "out").status == 0
    for name in ("tokenizer.json", "generation_config.json", "modeling_midus.py"):
        assert (tmp_path / "out" / name).read_bytes() == (checkpoint / name).read_bytes()
    assert {file.name for file in (tmp_path / "out").iterdir()} == {file.name for file in checkpoint.iterdir()}


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


def test_an_output_of_ours_is_replaced_when_asked(tmp_path, chapters, checkpoint):
    words = ("zero", checkpoint, "--output", tmp_path / "out")
    assert chapters(*words, "--chapters", "1").status == 0
    assert chapters(*words, "--chapters", "2", "--overwrite").status == 0
    bank = read_tensors(tmp_path / "out")[bank_name()]
    assert bank[rows(1)].any() and not bank[rows(2)].any()


REFUSED = {
    "unknown chapter": (["zero", "--chapters", "6"], "chapters is '6'; expected numbers from 0 to 5"),
    "chapter twice": (["zero", "--chapters", "2,1-3"], "chapters is '2,1-3', which names 2 twice"),
    "no numbers": (["prune", "--chapters", "three"], "chapters is 'three'; expected numbers and ranges such as 3,7-9"),
    "range from behind": (["prune", "--chapters", "4-2"], "chapters is '4-2'; expected numbers and ranges"),
    "nothing": (["zero", "--chapters", ","], "chapters is ','; expected numbers and ranges"),
    "swap of three": (["swap", "--chapters", "1-3"], "chapters is '1-3'; expected the two that are swapped"),
    "too few left": (
        ["prune", "--chapters", "1-4"],
        "chapters is '1-4', which leaves 1 chapters to choose k = 2 of; expected k or more. Prune fewer.",
    ),
    "unknown bank": (["zero", "--chapters", "1", "--bank", "1"], "bank is 1; expected a number from 0 to 0"),
    "unknown memory": (
        ["zero", "--chapters", "1", "--memory", "other"],
        "memory is 'other'; expected the name of a memory of chapters, of which the model has: chapters.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_request_is_one_line_and_writes_nothing(tmp_path, chapters, checkpoint, case):
    (verb, *words), message = REFUSED[case]
    done = chapters(verb, checkpoint, *words, "--output", tmp_path / "out")
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert message in done.err
    assert not (tmp_path / "out").exists()


def test_an_existing_output_is_refused(tmp_path, chapters, checkpoint):
    (tmp_path / "out").mkdir()
    done = chapters("zero", checkpoint, "--chapters", "1", "--output", tmp_path / "out")
    assert done.status == 2 and f"output {tmp_path / 'out'} exists; pass --overwrite" in done.err


def test_a_model_without_chapters_is_refused(tmp_path, chapters):
    model = save_chapters(tmp_path / "model")
    words = ("zero", model, "--chapters", "1", "--output", tmp_path / "out")
    edit_config(model, memory=[])
    done = chapters(*words)
    assert done.status == 2 and "has no memory of type 'chapters'" in done.err
    edit_config(model, memory=[{"type": "chapters", **options(), "layers": list(LAYERS)}], upscale=...)
    done = chapters(*words)
    assert done.status == 2 and "was not made by upscale" in done.err


def test_several_memories_must_be_told_apart(tmp_path, chapters):
    model = save_chapters(tmp_path / "model", names=("chapters", "chapters-2"))
    done = chapters("zero", model, "--chapters", "1", "--output", tmp_path / "out")
    assert done.status == 2
    assert "the model has several memories of chapters, chapters, chapters-2; expected one of them" in done.err


def test_one_bank_of_several_is_not_pruned(tmp_path, chapters):
    model = save_chapters(tmp_path / "model", share="every:2")
    done = chapters("prune", model, "--chapters", "1", "--bank", "0", "--output", tmp_path / "out")
    assert done.status == 2
    assert "bank is 0; expected none to prune, for the 2 banks of memory 'chapters'" in done.err
