"""What the benchmark of attention to the depth times, when it refuses to, and how it goes on."""

import argparse
from collections import Counter

import pytest
import torch

from benchmarks.depth_cost import bench as depth_bench
from benchmarks.depth_cost.__main__ import main
from benchmarks.depth_cost.layer import Layer
from benchmarks.depth_cost.shapes import DEFAULT_SHAPES, KV_HEADS, PAPER, WHATS, WIDTH, Shape, shapes, whats
from benchmarks.timing import PROFILES
from benchmarks.tracked import RESULTS, read


def expected_of(layer):
    query = layer.query.unflatten(1, (KV_HEADS, layer.shape.group))  # [1, K, G, T, d]
    scores = (query @ layer.key.unsqueeze(2).mT) * WIDTH**-0.5
    tokens = layer.shape.tokens
    scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), float("-inf"))
    of_depth = torch.stack([(query * key.unsqueeze(2)).sum(-1) for key in layer.keys], dim=-1) * WIDTH**-0.5
    shares = torch.cat([scores, of_depth], dim=-1).softmax(-1)
    expected = shares[..., :tokens] @ layer.value.unsqueeze(2)
    expected = expected + sum(
        shares[..., tokens + slot, None] * value.unsqueeze(2) for slot, value in enumerate(layer.values)
    )
    return expected.flatten(1, 2)


@pytest.mark.parametrize("what", ["merged", "merged-flash"])
def test_the_joined_layer_is_one_softmax_over_sequence_and_depth(what):
    layer = Layer(Shape(7, 2, 3), "cpu", torch.float32)
    torch.testing.assert_close(layer.forward(what)(), expected_of(layer))
    assert not torch.allclose(layer.alone(), expected_of(layer))


@pytest.mark.parametrize("what", ["sequence", "usual"])
def test_the_sequence_alone_is_that_of_torch(what):
    layer = Layer(Shape(5, 2, 1), "cpu", torch.float32)
    expected = torch.nn.functional.scaled_dot_product_attention(
        layer.query, layer.key, layer.value, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(layer.forward(what)(), expected)
    assert layer.chosen_kernel == "FLASH_ATTENTION"


def test_every_task_runs_and_makes_every_gradient():
    layer = Layer(Shape(5, 2, 3), "cpu", torch.float32)
    made = {what: layer.task(what).run(None) for what in WHATS["cpu"]}
    assert {what: len(gradients) for what, gradients in made.items() if what != "bound"} == {
        "sequence": 3,
        "depth": 1 + 2 * 3,
        "merged": 3 + 2 * 3,
    }
    assert all(gradient.any() for what, gradients in made.items() if what != "bound" for gradient in gradients)
    assert made["bound"].numel() == 2 * 3 * 5 * KV_HEADS * WIDTH


def test_what_must_be_moved_is_what_tensors_hold():
    layer = Layer(Shape(5, 4, 6), "cpu", torch.float32)
    slots = sum(slot.numel() for slot in (*layer.keys, *layer.values))
    query = layer.query.numel()
    forward = query + slots + query
    backward = (
        query + slots + query + query + query + slots
    )  # queries, slots, what was read and its gradient; gradients of both
    assert layer.copies == pytest.approx((forward + backward) / (2 * slots))


@pytest.mark.parametrize("part", ["output", "query", "key", "keys", "values"])
def test_an_error_is_found_in_whatever_is_made(part, monkeypatch):
    layer = Layer(Shape(6, 2, 3), "cpu", torch.float32)
    right = layer.forward("merged")
    assert layer.error("merged") < 1e-5
    if part == "output":
        monkeypatch.setattr(layer, "forward", lambda what: lambda: 1.01 * right())
    else:
        leaf = {"query": layer.query, "key": layer.key, "keys": layer.keys[1], "values": layer.values[2]}[part]
        leaf.register_hook(lambda gradient: 1.01 * gradient)
    assert 2e-3 < layer.error("merged") < 2e-2


def test_an_error_that_is_no_number_is_the_largest(monkeypatch):
    layer = Layer(Shape(3, 2, 2), "cpu", torch.float32)
    right = layer.forward("merged")
    monkeypatch.setattr(layer, "forward", lambda what: lambda: right() * float("nan"))
    assert layer.error("merged") == float("inf")


WORDS = ["--device", "cpu", "--seconds", "0.01"]


def statuses(folder):
    return [(row["tokens"], row["what"], row["status"]) for row in read(folder / "depth_cost.csv")]


def test_a_row_of_each_thing_is_kept(tmp_path, capsys):
    assert main([*WORDS, "--shapes", "4x2x2", "--results", str(tmp_path)]) == 0
    rows = read(tmp_path / "depth_cost.csv")
    assert statuses(tmp_path) == [("4", what, "ok") for what in WHATS["cpu"]]
    assert {(row["dtype"], row["group"], row["slots"], row["wall_ms"]) for row in rows} == {("float32", "2", "2", "")}
    assert all(float(row["median_ms"]) > 0 for row in rows)
    assert [row["kernel"] for row in rows] == ["", "FLASH_ATTENTION", "", ""]
    assert [bool(row["error"]) for row in rows] == [False, True, False, False]
    assert "4x2x2 merged" in capsys.readouterr().err


def test_what_has_a_row_is_not_measured_again(tmp_path, monkeypatch, capsys):
    words = [*WORDS, "--results", str(tmp_path), "--resume"]
    assert main([*words, "--shapes", "4x2x2"]) == 0
    before = read(tmp_path / "depth_cost.csv")
    assert main([*words, "--shapes", "4x2x2,3x2x2"]) == 0
    after = read(tmp_path / "depth_cost.csv")
    assert after[: len(before)] == before and {row["date"] for row in after} == {before[0]["date"]}
    assert set(Counter((row["tokens"], row["what"]) for row in after).values()) == {1} and len(after) == 2 * len(
        before
    )
    assert "4x2x2: measured before" in capsys.readouterr().err
    monkeypatch.setattr(depth_bench, "Layer", lambda *given: pytest.fail("measured again"))
    assert main([*words, "--shapes", "4x2x2,3x2x2"]) == 0


def test_what_is_wrong_is_not_timed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Layer, "error", lambda layer, what: 0.5)
    words = [*WORDS, "--results", str(tmp_path), "--resume", "--shapes", "4x2x2"]
    assert main(words) == 1
    assert statuses(tmp_path) == [("4", "merged", "refused")] + [
        ("4", what, "ok") for what in ("sequence", "depth", "bound")
    ]
    message = "4x2x2 merged: differs from float64 by 5.00e-01 (RMS ratio); at most 1e-04 is right. It is not timed."
    assert f"FAILED {message}" in capsys.readouterr().err
    assert main(words) == 1  # as a run in one piece
    assert len(statuses(tmp_path)) == 4
    assert "FAILED float32 4 2 2 merged: refused before" in capsys.readouterr().err


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("other\nfurther")])
def test_what_cannot_run_keeps_nothing_else_from_being_timed(error, tmp_path, monkeypatch, capsys):
    def broken(layer):
        raise error

    def scarce(shape, device, dtype):
        if shape.tokens == 9:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return Layer(shape, device, dtype)

    monkeypatch.setattr(Layer, "depth", broken)
    monkeypatch.setattr(depth_bench, "Layer", scarce)
    status = {False: "failed", True: "out of memory"}[isinstance(error, torch.OutOfMemoryError)]
    words = [*WORDS, "--results", str(tmp_path), "--shapes", "9x2x2,4x2x2", "--whats", "sequence,depth"]
    assert main(words) == (1 if status == "failed" else 0)
    of_nine = [("9", what, "out of memory") for what in ("sequence", "depth")]
    assert statuses(tmp_path) == [*of_nine, ("4", "depth", status), ("4", "sequence", "ok")]
    printed = capsys.readouterr().err
    assert ("FAILED 4x2x2 depth: RuntimeError: other\n" in printed) == (status == "failed")


def test_profiles_are_of_what_reads_both_once(tmp_path):
    words = [*WORDS, "--results", str(tmp_path), "--resume", "--profile", "--shapes", "4x2x2"]
    assert main(words) == 0
    rows = read(tmp_path / PROFILES)
    assert {(row["benchmark"], row["subject"]) for row in rows} == {("depth", "depth 4x2x2, merged")}
    assert main(words) == 0 and read(tmp_path / PROFILES) == rows


def test_shapes_of_the_paper_are_those_of_its_tables():
    assert shapes("4096x8x64,16384x32x64") == (Shape(4096, 8, 64), Shape(16384, 32, 64))
    assert DEFAULT_SHAPES["cuda"] == tuple(PAPER) and len(PAPER) == 12
    sequence, joined = PAPER[Shape(65536, 8, 64)]
    assert sequence / joined == pytest.approx(0.973, abs=5e-4)  # what the abstract says


@pytest.mark.parametrize("text", ["4096", "4096x8", "4096x8x0", "4096x8x-1", "axbxc"])
def test_other_shapes_are_refused(text):
    with pytest.raises(
        argparse.ArgumentTypeError, match=f"'{text}' is no shape; expected tokens x group x slots, as in"
    ):
        shapes(text)


def test_what_is_not_timed_is_refused():
    assert whats("depth,merged-flex") == ("depth", "merged-flex")
    message = "'all' is not timed; expected some of sequence, usual, merged, merged-flash, depth, bound, merged-flex."
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        whats("all")


def test_rows_that_are_tracked_have_its_columns():
    (columns,) = {tuple(row) for row in read(RESULTS / "depth_cost.csv")}
    assert columns == tuple(depth_bench.Row.__dataclass_fields__)
