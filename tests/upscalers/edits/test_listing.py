"""`list` tells what each chapter holds, in full where there are few and in sum where there are many."""

import pytest
import torch

from midus_hf.ops.chapters.quantisation import dequantise_rows
from tests.upscalers.checkpoints import read_tensors, write_tensors
from tests.upscalers.edits.made import LAYERS, TOKENS, bank_name, router_names, save_chapters


def test_norms_and_biases_are_those_of_the_tensors(chapters, checkpoint):
    listed = chapters("list", checkpoint, "--json").json()
    (memory,) = listed["memories"]
    assert listed["edits"] == []
    assert (memory["name"], memory["site"], memory["chapters"]) == ("chapters", "behind-attention", 6)
    assert (memory["chapter_tokens"], memory["shared_chapters"], memory["k"]) == (TOKENS, 1, 2)
    (bank,) = memory["banks"]
    assert (bank["bank"], bank["layers"]) == (0, list(LAYERS))
    tensors = read_tensors(checkpoint)
    norms = tensors[bank_name()].double().norm(dim=1).view(6, TOKENS).mean(1)
    assert bank["row_norms"] == pytest.approx(norms.tolist())
    for layer in LAYERS:
        assert bank["router_biases"][str(layer)] == tensors[router_names(layer)[1]].tolist()


@pytest.mark.parametrize("bits", [8, 4])
def test_norms_of_integers_are_of_what_they_stand_for(tmp_path, chapters, bits):
    model = save_chapters(tmp_path / "model", bank_bits=bits)
    tensors = read_tensors(model)
    tables = [tensors[f"{bank_name()}_{part}"] for part in ("integers", "scales")]
    expected = dequantise_rows(*tables, bits, torch.float32).norm(dim=1).view(6, TOKENS).mean(1)
    (memory,) = chapters("list", model, "--json").json()["memories"]
    assert memory["banks"][0]["row_norms"] == pytest.approx(expected.tolist())
    assert f"one matrix, of integers of {bits} bits" in chapters("list", model).out


def test_edits_are_listed(tmp_path, chapters, checkpoint):
    assert chapters("zero", checkpoint, "--chapters", "1-3", "--output", tmp_path / "out").status == 0
    listed = chapters("list", tmp_path / "out", "--json").json()
    assert [edit["command"] for edit in listed["edits"]] == ["zero"]
    assert [norm == 0 for norm in listed["memories"][0]["banks"][0]["row_norms"]] == [False, *[True] * 3, *[False] * 2]
    assert "edited: zero, chapters 1-3 of chapters" in chapters("list", tmp_path / "out").out


def test_few_chapters_are_shown_one_by_one(chapters, checkpoint):
    shown = chapters("list", checkpoint).out
    assert "bank 0, read by layers 0-3" in shown and "bias 3" in shown
    kinds = [line.split()[:2] for line in shown.splitlines() if line.split()[1:2] in (["shared"], ["routed"])]
    assert kinds == [["0", "shared"], *([str(number), "routed"] for number in range(1, 6))]


def test_many_chapters_are_shown_in_sum(tmp_path, chapters):
    model = save_chapters(tmp_path / "model", chapters=80, memory_tokens=80)
    assert chapters("zero", model, "--chapters", "7,70-72", "--output", tmp_path / "out").status == 0
    shown = chapters("list", tmp_path / "out").out
    assert "routed" not in shown
    assert "over all chapters" in shown and "7,70-72" in shown and "bias 2" in shown


def test_every_bank_is_told_or_one(tmp_path, chapters):
    model = save_chapters(tmp_path / "model", share="none", names=("chapters", "chapters-2"))
    memories = chapters("list", model, "--json").json()["memories"]
    assert [memory["name"] for memory in memories] == ["chapters", "chapters-2"]
    assert [bank["layers"] for bank in memories[0]["banks"]] == [[layer] for layer in LAYERS]
    words = ("--memory", "chapters-2", "--bank", "3", "--json")
    (memory,) = chapters("list", model, *words).json()["memories"]
    assert (memory["name"], [bank["bank"] for bank in memory["banks"]]) == ("chapters-2", [3])


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_what_is_not_finite_is_said(tmp_path, chapters, words):
    model = save_chapters(tmp_path / "model")
    tensors = read_tensors(model)
    tensors[bank_name()][0, 0] = float("inf")
    write_tensors(model, tensors)
    done = chapters("list", model, *words)
    if words:
        assert done.json()["memories"][0]["banks"][0]["row_norms"][0] is None
    else:
        assert "not finite" in done.out


def test_a_bank_or_a_memory_that_is_not_there_is_refused(chapters, checkpoint):
    done = chapters("list", checkpoint, "--bank", "1")
    assert done.status == 2 and "bank is 1; expected a number from 0 to 0" in done.err
    done = chapters("list", checkpoint, "--memory", "keys")
    assert done.status == 2 and "memory is 'keys'; expected the name of a memory of chapters" in done.err
