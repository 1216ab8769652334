"""A model without its parts: without all of them it is the base, bit for bit, and then it is itself again."""

import csv
import io
import json
from dataclasses import replace

import pytest
import torch
from look.upscaled_folders import METHODS, acting, loaded, saved_pair, saved_with_bank
from peft import LoraConfig, get_peft_model
from tiny import prompt, save_tiny_model, tiny_model
from training.tiny_run import save_native

from midus_hf.look.ablation import as_csv, as_json, draw_layers, layer_effects, layers_table
from midus_hf.look.drift import base_within, drift
from midus_hf.look.parts import Part, added_parts, switched_off
from midus_hf.look.pictures import as_png
from midus_hf.look.text_rows import TextRows, effect_between, read_rows
from upscalers.runs.upscale import upscale

TEXT = TextRows("text", [prompt(20, 1)[0], prompt(14, 1, seed=2)[0], prompt(9, 1, seed=3)[0]], [0, 1, 2])


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(prompt(), use_cache=False).logits


def state_of(model) -> list:
    """What a context could leave behind: hooks, and the attributes of layers that are no modules."""
    return [
        (len(module._forward_hooks), len(module._forward_pre_hooks), repr(getattr(module, "sites", None)))
        for module in model.modules()
    ]


@pytest.mark.parametrize("method", METHODS)
def test_without_all_parts_a_model_is_its_base_and_then_itself_again(family, method):
    base, folder = saved_pair(family, method)
    model = acting(loaded(folder))
    usual, state = logits(model), state_of(model)
    added = added_parts(model)
    with switched_off(model, added.parts):
        without = logits(model)
    assert torch.equal(without, logits(loaded(base))) and not torch.equal(without, usual)
    assert torch.equal(logits(model), usual) and state_of(model) == state
    for part in added.parts:
        with switched_off(model, [part]):
            one = logits(model)
        assert not torch.equal(one, usual) and (len(added.parts) == 1 or not torch.equal(one, without))
    assert torch.equal(logits(model), usual) and state_of(model) == state and added.whole_base


def test_a_layer_of_the_familys_own_kind_is_left_out_of_every_family(native_family, tmp_path):
    base = save_tiny_model(native_family, tmp_path / "base")
    upscale(base=base, method="llama-pro", output=tmp_path / "model", verify=False)
    model = acting(loaded(tmp_path / "model"))
    with switched_off(model, added_parts(model).parts):
        assert torch.equal(logits(model), logits(loaded(base)))


def test_parts_are_named_by_what_they_are():
    added = {method: added_parts(loaded(saved_pair("llama", method)[1])) for method in METHODS}
    assert {method: list(map(str, found.parts)) for method, found in added.items()} == {
        "midus-hml": ["block 1", "block 4"],
        "midus-pkm": ["block 1", "block 4"],
        "moc": ["chapters 0", "chapters 2"],
        "ultramem-v2": ["ultramem 0", "ultramem 1", "ultramem 2", "ultramem 3"],
        "moda": ["depth-attention 1", "depth-attention 2", "depth-attention 3"],
        "llama-pro": ["layer 2", "layer 5"],
    }
    assert [part.kind for part in added["moda"].parts] == ["depth"] * 3
    assert added["moc"].banks == (Part("memory", (0, 2), "chapters", 0),)
    assert str(added["moc"].banks[0]) == "chapters bank 0 (layers 0, 2)"
    assert list(map(str, added["llama-pro"].base)) == [f"layer {layer} of the base" for layer in (0, 1, 3, 4)]


def test_slots_are_written_while_the_depth_is_not_read():
    base, folder = saved_pair("llama", "moda", attention_slots="projected", slots=3)
    model = acting(loaded(folder))
    with switched_off(model, added_parts(model).parts):
        assert torch.equal(logits(model), logits(loaded(base)))


def test_of_a_model_that_was_upscaled_twice_the_last_time_counts(tmp_path):
    _, first = saved_pair("llama", "midus-hml")
    acting(loaded(first)).save_pretrained(tmp_path / "trained")
    options = {**METHODS["moc"], "layers": [0, 5]}
    upscale(base=tmp_path / "trained", method="moc", output=tmp_path / "second", options=options, verify=False)
    model = acting(loaded(tmp_path / "second"))
    model.model.layers[1].load_state_dict(loaded(first := tmp_path / "trained").model.layers[1].state_dict())
    model.model.layers[4].load_state_dict(loaded(first).model.layers[4].state_dict())
    assert list(map(str, added_parts(model).parts)) == ["chapters 0", "chapters 5"]
    with switched_off(model, added_parts(model).parts):
        assert torch.equal(logits(model), logits(loaded(first)))


def test_a_plan_that_drops_layers_of_the_base_leaves_no_base(tmp_path):
    config = loaded(save_native("llama", tmp_path)).config
    model = tiny_model("llama")
    model.config.upscale = {
        **config.upscale,
        "plan": [{"base": 0}, {"new": True}, {"base": 2}, {"base": 3}],
        "new_layers": [1],
        "base_config": {"num_hidden_layers": 4},
    }
    assert not added_parts(model).whole_base
    assert layers_table(layer_effects(model, [TEXT])).rows[-1][0] == "loss of what is left"


def test_losses_are_those_of_the_model_without_each_part():
    base, folder = saved_pair("llama", "moc")
    model = acting(loaded(folder))
    told = []
    found = layer_effects(model, [TEXT], with_base=True, batch_size=2, progress=lambda *counts: told.append(counts))
    assert told[-1] == (TEXT.num_tokens * 9,) * 2
    assert found.losses["text"] == read_rows(model, TEXT, batch_size=2).mean
    assert found.without_all.losses["text"] == read_rows(loaded(base), TEXT, batch_size=2).mean
    assert [row.name for row in found.rows] == [
        "chapters 0", "chapters 2", "chapters bank 0 (layers 0, 2)", "all of them",
        *(f"layer {layer} of the base" for layer in range(4)),
    ]  # fmt: skip
    assert found.parts[2].losses == found.without_all.losses
    for row in found.rows:
        difference = row.losses["text"] - found.losses["text"]
        assert row.effects["text"].difference == pytest.approx(difference, abs=1e-9) and difference
        assert row.effects["text"].standard_error > 0


@pytest.mark.parametrize("method", METHODS)
def test_layers_in_front_of_a_part_compute_once_and_losses_are_the_same_bits(family, method):
    model = acting(loaded(saved_pair(family, method)[1]))
    computed = [0] * len(model.model.layers)
    for layer, block in enumerate(model.model.layers):
        forward = block.forward

        def counting(*arguments, layer=layer, forward=forward, **given):
            computed[layer] += 1
            return forward(*arguments, **given)

        block.forward = counting
    state = state_of(model)
    found = layer_effects(model, [TEXT], with_base=True, batch_size=2)
    usual = read_rows(model, TEXT, batch_size=2)
    assert found.losses["text"] == usual.mean and state_of(model) == state
    assert all(block.forward.__name__ == "counting" for block in model.model.layers)
    times = [count - 2 for count in computed]  # by `layer_effects` alone
    for row in found.rows:
        with switched_off(model, added_parts(model).parts if row.part is None else [row.part]):
            alone = read_rows(model, TEXT, batch_size=2)
        assert row.losses["text"] == alone.mean and row.effects["text"] == effect_between(usual, alone)
    passes = 2 * (len(found.rows) + 1)  # two batches
    assert times[-1] == passes
    parts = [added_parts(model).parts if row.part is None else [row.part] for row in found.rows]
    from_the_first = sum(0 in part.layers for of_row in parts for part in of_row[:1])
    carries = method == "moda"  # something else than the residual stream, to later layers
    assert times[0] == (passes if carries else 2 * (1 + from_the_first))


def test_rows_fetch_by_the_path_of_their_document(tmp_path):
    base = save_tiny_model("llama", tmp_path / "base")
    model = loaded(saved_with_bank(base, tmp_path).model)
    paths = torch.tensor([[0, 1], [1, 4], [2, 6]])
    rows = replace(TEXT, paths=paths)
    found = layer_effects(model, [rows], batch_size=2)
    for number, row in enumerate(TEXT.rows):
        with torch.no_grad():
            logits_of_row = model(row[None], memory_ids=paths[number : number + 1], use_cache=False).logits[0, :-1]
        expected = torch.nn.functional.cross_entropy(logits_of_row, row[1:], reduction="sum").item()
        assert read_rows(model, rows, batch_size=2).sums[number].item() == pytest.approx(expected, rel=1e-5)
    assert found.without_all.losses["text"] == read_rows(loaded(base), TEXT, batch_size=2).mean
    assert len(found.parts) == 4 and all(row.effects["text"].difference for row in found.parts)
    assert drift(model, base_within(model), [rows], batch_size=2)[0].divergence > 0
    assert drift(model, base_within(model), [TEXT], batch_size=2)[0].divergence == 0, "nothing was fetched"


def test_a_layer_of_the_base_is_left_out_by_itself():
    model, kept = tiny_model("gemma3"), Part("base", (2,))
    with switched_off(model, [kept]):
        without = logits(model)
    del model.model.layers[2]
    model.config.num_hidden_layers, model.config.layer_types = 3, [*model.config.layer_types]
    del model.config.layer_types[2]
    assert torch.equal(without, logits(model))


@pytest.mark.parametrize("what", ["compiled", "peft"])
def test_wrapped_models_do_without_their_parts_too(what):
    base, folder = saved_pair("llama", "moc")
    model = acting(loaded(folder))
    if what == "compiled":
        called = torch.compile(model, backend="eager")
        logits(called)  # so that it has been compiled before
    else:
        lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["memories.chapters"])
        called = get_peft_model(model, lora).eval()
    with switched_off(called, added_parts(called).parts):
        assert torch.equal(logits(called), logits(loaded(base)))


def test_a_model_that_nothing_was_added_to_is_refused():
    with pytest.raises(
        ValueError, match="this llama model has no layer and no memory that was added to a base; expected"
    ):
        added_parts(tiny_model("llama"))


def test_a_model_is_restored_when_the_work_fails():
    model = acting(loaded(saved_pair("llama", "moc")[1]))
    usual, state = logits(model), state_of(model)
    with pytest.raises(RuntimeError, match="stopped"), switched_off(model, added_parts(model).parts):
        raise RuntimeError("stopped")
    assert torch.equal(logits(model), usual) and state_of(model) == state


def test_a_report_has_every_number():
    pytest.importorskip("matplotlib")
    model = acting(loaded(saved_pair("llama", "midus-hml")[1]))
    found = layer_effects(model, [TEXT], with_base=True)
    told = json.loads(json.dumps(as_json(found)))
    assert told["without_all_is_the_base"] and told["texts"] == {
        "text": {"tokens": TEXT.num_tokens - 3, "loss": found.losses["text"]}
    }
    assert [row["part"] for row in told["parts"]] == ["block 1", "block 4"] and len(told["base"]) == 4
    assert told["parts"][1]["texts"]["text"]["difference"] == found.parts[1].effects["text"].difference
    lines = list(csv.DictReader(io.StringIO(as_csv(found))))
    assert [(line["kind"], line["layers"]) for line in lines[:3]] == [("block", "1"), ("block", "4"), ("all", "")]
    assert float(lines[2]["loss"]) == found.without_all.losses["text"]
    table = layers_table(found)
    assert table.rows[0] == ["none", f"{found.losses['text']:.5f}"] and "±" in table.rows[1][1]
    assert table.rows[-1] == ["loss of the base's layers", f"{found.without_all.losses['text']:.5f}"]
    assert as_png(draw_layers(found)).startswith(b"\x89PNG")
