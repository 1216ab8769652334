"""Whole models: what is built, what trains, and that all of it runs."""

import dataclasses

import pytest
import torch

from benchmarks.models.build import build, new_parameters, read_base, set_trained, variants
from benchmarks.models.measure import measure
from benchmarks.models.points import FILE, METHODS, Point, Row
from benchmarks.models.run import run
from benchmarks.tracked import read
from midus_hf.memory.registry import MemoryModule


def _by_name(base, methods, placements=None):
    _, config = read_base(base)
    return {variant.name: variant for variant in variants(config, methods, placements)}


def test_all_methods_are_measured_in_all_phases(model_arguments, tmp_path):
    assert run(model_arguments()) == 0
    rows = read(tmp_path / FILE)
    assert list(rows[0]) == [field.name for field in dataclasses.fields(Row)]
    assert {row["method"] for row in rows} == set(METHODS)
    assert {row["phase"] for row in rows if row["method"] == "midus-hml"} == {"train", "generate", "prefill"}
    for row in rows:
        assert (row["status"], row["error"], row["round"], row["rounds"]) == ("ok", "", "1", "1")
        assert float(row["seconds"]) > 0
        assert row["host_s"] == row["device_s"] == row["launches"] == ""  # there is no GPU
        assert float(row["tokens_per_s"]) > 0
        assert float(row["peak_gb"]) >= 0
        assert int(row["new_parameters"]) < int(row["total_parameters"])
    trained = {row["method"]: (row["trained_parameters"], row["new_parameters"]) for row in rows}
    assert trained["midus-hml"][0] == trained["midus-hml"][1]
    totals = {row["method"]: row["total_parameters"] for row in rows}
    assert trained["base"] == (totals["base"], "0")
    assert trained["solar"][0] == totals["solar"]


def test_models_that_read_alike_are_read_once_and_trained_each(model_arguments, tmp_path):
    assert run(model_arguments("--methods", "llama-pro,opt-deus,midus-hml")) == 0
    measured = {(row["method"], row["placement"], row["phase"]) for row in read(tmp_path / FILE)}
    assert ("llama-pro", "llama-pro", "generate") in measured
    assert ("opt-deus", "top-heavy", "train") in measured
    assert ("opt-deus", "top-heavy", "generate") not in measured
    assert ("midus-hml", "distributed", "prefill") in measured
    assert ("midus-hml", "top-heavy", "train") in measured
    assert ("midus-hml", "top-heavy", "prefill") not in measured


@pytest.mark.parametrize(
    ("base", "total", "new"),
    [
        ("smollm2-135m", 134_515_008, {"llama-pro": 53_100_000, "midus-hml": 13_341_120}),
        ("llama-3.2-1b", 1_235_814_400, {"llama-pro": 486_600_000, "midus-hml": 54_542_336, "moc": 76_030_208}),
        ("llama-3.1-8b", 8_030_261_248, {"opt-deus": 3_490_000_000, "midus-hml": 423_700_000}),
    ],
)
def test_models_have_their_published_sizes(base, total, new):
    for name, variant in _by_name(base, ["base", *new], ["top-heavy"]).items():
        model = build(variant, "bfloat16", "meta")
        parameters = sum(parameter.numel() for parameter in model.parameters())
        added = sum(parameter.numel() for parameter in new_parameters(model, variant))
        assert parameters - added == total, name
        if variant.method != "base":
            assert added == pytest.approx(new[variant.method], rel=0.001)


def test_memories_hold_values_and_only_new_layers_train(tmp_path, model_arguments):
    base = model_arguments().base[0]
    for variant in _by_name(base, ["midus-hml", "midus-pkm", "midus-linear"]).values():
        model = build(variant, "float32", "cpu")
        memories = [module for module in model.modules() if isinstance(module, MemoryModule)]
        assert len(memories) == len(variant.new_layers) == 2
        for memory in memories:
            assert all(getattr(memory, name).count_nonzero() > 0 for name in memory.names_of("value"))
        trained = {id(parameter) for parameter in set_trained(model, variant)}
        stack = model.get_decoder().layers
        assert trained == {id(p) for index in variant.new_layers for p in stack[index].parameters()}


def test_attached_memory_and_its_tables_train_and_nothing_else(model_arguments):
    (variant,) = _by_name(model_arguments().base[0], ["moc"]).values()
    model = build(variant, "float32", "cpu")
    assert variant.new_layers == []
    trained = {id(parameter) for parameter in set_trained(model, variant)}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in trained}
    assert "model.memory_tables.chapters.0.bank" in names
    assert all(".memories.chapters." in name or ".memory_tables.chapters." in name for name in names)
    assert names == {name for name, _ in model.named_parameters() if "chapters" in name}


def test_a_step_trains_what_the_method_trains_and_leaves_no_gradients(model_arguments):
    base = model_arguments().base[0]
    (variant,) = _by_name(base, ["midus-hml"], ["distributed"]).values()
    model = build(variant, "float32", "cpu")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    measured = measure(model, variant, Point("train", 2, 2, 8), "cpu", with_memory=True)
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed
    assert all(int(name.split(".")[2]) in variant.new_layers for name in changed)
    assert all(parameter.grad is None for parameter in model.parameters())
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert measured.peak_bytes > weights


def test_generating_holds_less_than_training(model_arguments):
    base = model_arguments().base[0]
    (variant,) = _by_name(base, ["base"]).values()
    model = build(variant, "float32", "cpu")
    point = Point("generate", 1, 1, 8, 4, "eager")
    generating = measure(model, variant, point, "cpu", with_memory=True)
    training = measure(model, variant, Point("train", 2, 2, 8), "cpu", with_memory=True)
    assert generating.peak_bytes < training.peak_bytes
    assert measure(model, variant, point, "cpu", with_memory=False).peak_bytes is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--base", "gpt-2"],
            "base is 'gpt-2'; expected one of llama-3.1-8b, llama-3.2-1b, smollm2-135m, or the path",
        ),
        (["--phases", "sleep"], "phase is 'sleep'; expected one of train, generate, prefill"),
        (["--batches", "3"], "batch is 3; expected a multiple of accumulation = 2"),
        (["--decoding", "beam"], "decoding is 'beam'; expected one of eager, graph, compiled"),
        (["--decoding", "graph"], "decoding is 'graph'; expected 'eager' or 'compiled' on a CPU"),
        (["--resume", "--no-append"], "--resume is about rows that --no-append does not keep; leave one of them out"),
        (["--profile", "--no-append"], "--profile is about rows that --no-append does not keep"),
    ],
)
def test_what_does_not_exist_is_refused(words, message, model_arguments):
    with pytest.raises(SystemExit, match=message):
        run(model_arguments(*words))
