"""A model and its base: without its parts it is the base, bit for bit."""

import json
from dataclasses import replace

import pytest
import torch
from look.upscaled_folders import METHODS, acting, loaded, saved_pair, saved_with_bank
from tiny import logits, prompt, save_tiny_model
from training.tiny_run import refused

from midus_hf.anatomy.record import record_of
from midus_hf.evaluation.text_rows import TextRows, row_losses
from midus_hf.look.ablation import ablate, ablation_finding, ablation_panels, ablation_table, effect_between
from midus_hf.look.page import draw_panels
from midus_hf.models.view import ModelView, Part, switched_off
from upscalers.runs.upscale import upscale

TEXT = TextRows("text", [prompt(20, 1)[0], prompt(14, 1, seed=2)[0], prompt(9, 1, seed=3)[0]], [0, 1, 2])


def state_of(model) -> list:
    """What a context could leave behind: hooks, and the attributes of layers that are no modules."""
    return [
        (len(m._forward_hooks), len(m._forward_pre_hooks), repr(getattr(m, "sites", None))) for m in model.modules()
    ]


@pytest.mark.parametrize("method", METHODS)
def test_model_without_its_parts_is_its_base(family, method):
    base, folder = saved_pair(family, method)
    model = acting(loaded(folder))
    usual, state = logits(model), state_of(model)
    parts = ModelView(model).parts
    with pytest.raises(RuntimeError, match="stopped"), switched_off(model, parts):
        without = logits(model)
        raise RuntimeError("stopped")
    assert torch.equal(without, logits(loaded(base)))
    assert not torch.equal(without, usual)
    assert torch.equal(logits(model), usual)
    assert state_of(model) == state
    for part in parts:
        with switched_off(model, [part]):
            one = logits(model)
        assert not torch.equal(one, usual)
        assert (part.kind == "bank") == torch.equal(one, without)
    assert torch.equal(logits(model), usual)
    assert state_of(model) == state
    assert record_of(model.config).has_whole_base


def test_parts_are_named_by_what_they_are():
    added = {method: ModelView(loaded(saved_pair("llama", method)[1])).parts for method in METHODS}
    assert {method: [part.name for part in parts] for method, parts in added.items()} == {
        "midus-hml": ["block 1", "block 4"],
        "midus-pkm": ["block 1", "block 4"],
        "moc": ["chapters 0", "chapters 2", "chapters bank 0 (layers 0, 2)"],
        "ultramem-v2": ["ultramem 0", "ultramem 1", "ultramem 2", "ultramem 3"],
        "moda": ["depth-attention 1", "depth-attention 2", "depth-attention 3"],
        "llama-pro": ["layer 2", "layer 5"],
    }
    assert [part.kind for part in added["moda"]] == ["depth"] * 3
    assert added["moc"][2] == Part("chapters bank 0 (layers 0, 2)", "bank", (0, 2), "chapters")


def test_depth_slots_are_written_while_unread():
    base, folder = saved_pair("llama", "moda", attention_slots="projected")
    model = acting(loaded(folder))
    with switched_off(model, ModelView(model).parts):
        assert torch.equal(logits(model), logits(loaded(base)))


def test_second_upscaling_is_the_one_switched_off(tmp_path):
    _, first = saved_pair("llama", "midus-hml")
    acting(loaded(first)).save_pretrained(tmp_path / "trained")
    options = {**METHODS["moc"], "layers": [0, 5]}
    upscale(base=tmp_path / "trained", method="moc", output=tmp_path / "second", options=options, verify=False)
    model, trained = acting(loaded(tmp_path / "second")), loaded(tmp_path / "trained")
    for layer in (1, 4):
        model.model.layers[layer].load_state_dict(trained.model.layers[layer].state_dict())
    assert [part.name for part in ModelView(model).parts][:2] == ["chapters 0", "chapters 5"]
    with switched_off(model, ModelView(model).parts):
        assert torch.equal(logits(model), logits(trained))


@pytest.mark.parametrize("method", METHODS)
def test_ablation_losses_are_those_without_each_part(method):
    base, folder = saved_pair("llama", method)
    model = acting(loaded(folder))
    parts, state = ModelView(model).parts, state_of(model)
    result = ablate(model, [TEXT], batch_size=2)
    assert state_of(model) == state
    usual = row_losses(model, TEXT, batch_size=2)
    assert result.losses == {"text": usual.mean}
    *single, without_all = result.effects
    assert (without_all.kind, without_all.loss) == ("all", row_losses(loaded(base), TEXT, batch_size=2).mean)
    for part, row in zip(parts, single, strict=True):
        with switched_off(model, [part]):
            alone = row_losses(model, TEXT, batch_size=2)
        assert (row.part, row.kind, tuple(row.layers)) == (part.name, part.kind, part.layers)
        assert (row.loss, row.effect) == (alone.mean, effect_between(usual, alone))
        assert row.effect.difference == pytest.approx(row.loss - usual.mean, abs=1e-9)
        assert row.effect.standard_error > 0


def test_ablation_fetches_by_each_documents_path(tmp_path):
    base = save_tiny_model("llama", tmp_path / "base")
    model = loaded(saved_with_bank(base, tmp_path).model)
    rows = replace(TEXT, paths=torch.tensor([[0, 1], [1, 4], [2, 6]]))
    *single, without_all = ablate(model, [rows], batch_size=2).effects
    assert without_all.loss == row_losses(loaded(base), TEXT, batch_size=2).mean
    assert len(single) == 4
    assert all(row.effect.difference for row in single)


@pytest.mark.parametrize(
    ("part", "missing"),
    [
        (Part("typo bank", "bank", (0, 1), "typo"), "typo layer 0"),
        (Part("layer 99", "layer", (99,)), "decoder layer 99"),
    ],
    ids=str,
)
def test_unknown_part_is_refused(part, missing):
    model = loaded(saved_pair("llama", "moc")[1])
    before = state_of(model)
    with refused(f"part is '{part.name}', and the model has no {missing}; expected a part of this"):
        switched_off(model, [*ModelView(model).parts, part]).__enter__()
    assert state_of(model) == before


def test_ablation_report_has_every_number():
    pytest.importorskip("matplotlib")
    model = acting(loaded(saved_pair("llama", "midus-hml")[1]))
    result = ablate(model, [TEXT, TextRows("other", TEXT.rows[:2], TEXT.documents[:2])])
    rows = json.loads(json.dumps([row.row() for row in result.effects]))
    expected = [("block 1", "block", [1]), ("block 4", "block", [4]), ("all of them", "all", [])]
    assert [(row["part"], row["kind"], row["layers"]) for row in rows[::2]] == expected
    assert rows[2]["difference"] == result.effects[2].effect.difference
    assert rows[4]["loss"] == result.effects[4].loss
    table = ablation_table(result)
    assert table.rows[0][:2] == ["none", f"{result.losses['text']:.5f}"]
    assert "±" in table.rows[1][1]
    assert table.rows[-1][:2] == ["loss of the base's layers", f"{result.effects[4].loss:.5f}"]
    left, right = draw_panels(ablation_panels(result), one_scale=True).axes
    assert left.get_xlim() == right.get_xlim()
    assert "± one standard error" in left.get_xlabel()
    finding, largest = ablation_finding(result), max(result.effects[:4], key=lambda row: abs(row.effect.difference))
    assert f"the loss changes by {result.effects[4].effect:+.4f} on text and " in finding
    assert f"{largest.part} changes it most" in finding
    model.config.upscale["plan"].pop(0)  # a model that lacks layers of its base
    assert ablation_table(ablate(model, [TEXT])).rows[-1][0] == "loss of the remaining model"
