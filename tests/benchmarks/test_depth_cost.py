"""What the benchmark of attention to the depth times, and what it says that must be moved."""

import argparse

import pytest
import torch

from benchmarks.depth_cost import DEFAULT_ROWS, KV_HEADS, PAPER, WIDTH, Layer, Shape, main, measured, shapes
from benchmarks.tracked import read, this_run


def test_the_joined_layer_is_one_softmax_over_sequence_and_depth():
    layer = Layer(Shape(7, 2, 3), "cpu", torch.float32)
    query = layer.query.unflatten(1, (KV_HEADS, 2))  # [1, K, G, T, d]
    scores = (query @ layer.key.unsqueeze(2).mT) * WIDTH**-0.5
    scores = scores.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), float("-inf"))
    of_depth = torch.stack([(query * key.unsqueeze(2)).sum(-1) for key in layer.keys], dim=-1) * WIDTH**-0.5
    shares = torch.cat([scores, of_depth], dim=-1).softmax(-1)
    expected = shares[..., :7] @ layer.value.unsqueeze(2)
    expected = expected + sum(
        shares[..., 7 + slot, None] * value.unsqueeze(2) for slot, value in enumerate(layer.values)
    )
    torch.testing.assert_close(layer.joined(layer.sequence("sdpa")), expected.flatten(1, 2))
    assert not torch.allclose(layer.alone(), expected.flatten(1, 2))


def test_every_task_runs_and_makes_every_gradient():
    layer = Layer(Shape(5, 2, 3), "cpu", torch.float32)
    made = {name: task.run(None) for name, task in layer.tasks(("sdpa",)).items()}
    assert {name: len(gradients) for name, gradients in made.items() if name != "copy"} == {
        "sequence": 3,
        "depth": 1 + 2 * 3,
        "sdpa": 3 + 2 * 3,
    }
    assert all(gradient.any() for name, gradients in made.items() if name != "copy" for gradient in gradients)
    assert made["copy"].numel() == 2 * 3 * 5 * KV_HEADS * WIDTH


def test_what_must_be_moved_is_what_tensors_hold():
    layer = Layer(Shape(5, 4, 6), "cpu", torch.float32)
    slots = sum(slot.numel() for slot in (*layer.keys, *layer.values))
    query = layer.query.numel()
    forward = query + slots + query
    backward = (
        query + slots + query + query + query + slots
    )  # queries, slots, what was read and its gradient; gradients of both
    assert layer.copies == pytest.approx((forward + backward) / (2 * slots))


def test_a_row_compares_what_was_timed_together():
    (row,) = measured(this_run("cpu"), Shape(4, 2, 2), "cpu", torch.float32, 0.01)
    assert row.overhead == pytest.approx(row.joined_ms / row.sequence_ms - 1)
    assert (row.tokens, row.group, row.slots, row.joined_by, row.paper_overhead) == (4, 2, 2, "sdpa", None)
    assert min(row.depth_ms, row.bound_ms) > 0


def test_a_shape_that_does_not_fit_is_told_and_the_next_one_measured(monkeypatch, capsys):
    def scarce(run, shape, *rest):
        if shape.tokens == 9:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if shape.tokens == 8:
            raise RuntimeError("something else")
        return measured(run, shape, *rest)

    monkeypatch.setattr("benchmarks.depth_cost.measured", scarce)
    main(["--rows", "9x2x2,4x2x2", "--seconds", "0.01", "--no-append"])
    lines = capsys.readouterr().out.splitlines()[2:]
    assert lines[0] == "| 9x2x2 | out of memory | | | | | | | |" and lines[1].startswith("| 4x2x2 | sdpa | ")
    assert all(line.count("|") == 10 for line in lines)
    with pytest.raises(RuntimeError, match="something else"):
        main(["--rows", "8x2x2", "--no-append"])


def test_rows_are_kept(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.depth_cost.DEPTH_RESULTS", tmp_path / "depth.csv")
    main(["--rows", "4x2x2", "--seconds", "0.01"])
    (row,) = read(tmp_path / "depth.csv")
    assert (row["tokens"], row["joined_by"], row["dtype"], row["paper_overhead"]) == ("4", "sdpa", "float32", "")


def test_shapes_of_the_paper_are_those_of_its_tables():
    assert shapes("4096x8x64,16384x32x64") == (Shape(4096, 8, 64), Shape(16384, 32, 64))
    assert DEFAULT_ROWS["cuda"] == tuple(PAPER) and len(PAPER) == 12
    sequence, joined = PAPER[Shape(65536, 8, 64)]
    assert sequence / joined == pytest.approx(0.973, abs=5e-4)  # what the abstract says


@pytest.mark.parametrize("text", ["4096", "4096x8", "4096x8x0", "4096x8x-1", "axbxc"])
def test_other_shapes_are_refused(text):
    with pytest.raises(
        argparse.ArgumentTypeError, match=f"'{text}' is no shape; expected tokens x group x slots, as in"
    ):
        shapes(text)
