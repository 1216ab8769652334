"""Whatever is watched: a model computes what it did, and keeps no hook."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from models.gradients import enable_checkpointing
from models.memory_models import chapter_model, depth_model, hierarchical_model
from models.upscaled import upscaled_model
from tiny import prompt
from training.tiny_run import refused

from midus_hf.look.depth import record_depth
from midus_hf.look.usage import record_usage

ROW = prompt(5, 1)


class Watch(NamedTuple):
    model: Callable[[Any], Any]  # made in a folder
    record: Callable[[Any], Any]
    tokens: Callable[[Any], set[float]]  # that each memory was seen to read
    memory: str = ""  # name of its module, or nothing if it has no parameters
    inputs: dict[str, Any] = {}  # of a pass, in addition to tokens
    is_reentrant: bool = True  # whether it takes reentrant checkpointing


def tokens_of(counts_per_token: int) -> Callable[[Any], set[float]]:
    return lambda usage: {counts.sum().item() / counts_per_token for counts in usage.values() if counts.any()}


WATCHES = {
    "slots": Watch(lambda folder: upscaled_model("llama"), record_usage, tokens_of(4 * 3), "memory"),
    "slots of product keys": Watch(
        lambda folder: upscaled_model("llama", memory_type="midus-pkm"), record_usage, tokens_of(4 * 3), "memory"
    ),
    "opened chapters": Watch(
        lambda folder: chapter_model(routing="chunk", dtype=torch.float32), record_usage, tokens_of(2), "memories.chapters",
        is_reentrant=False,
    ),
    "depth": Watch(
        lambda folder: depth_model(base={"attention_dropout": 0.5}),
        record_depth,
        lambda readings: {reading.tokens for reading in readings},
        "memories.depth-attention",
    ),
    "blocks": Watch(
        lambda folder: hierarchical_model("llama", "hier-ffn", folder),
        record_usage,
        tokens_of(1),
        inputs={"memory_ids": torch.tensor([[1, 4, 13]])},
    ),
}  # fmt: skip


def hooks_and_attributes(model) -> list[Any]:
    return [(len(m._forward_hooks), len(m._forward_pre_hooks), set(vars(m))) for m in model.modules()]


@pytest.fixture(params=WATCHES)
def watch(request) -> Watch:
    return WATCHES[request.param]


def test_watched_model_computes_the_same_and_keeps_no_hook(watch, tmp_path):
    model = watch.model(tmp_path)
    with torch.no_grad():
        usual, before = model(ROW, **watch.inputs).logits, hooks_and_attributes(model)
        with watch.record(model) as outer:
            model(ROW, **watch.inputs)
            with watch.record(model) as inner:
                assert hooks_and_attributes(model) != before
                assert torch.equal(model(ROW, **watch.inputs).logits, usual)
    assert watch.tokens(outer) == {10}
    assert watch.tokens(inner) == {5}
    assert hooks_and_attributes(model) == before
    with pytest.raises(RuntimeError, match="stopped"), watch.record(model):
        raise RuntimeError("stopped")
    assert hooks_and_attributes(model) == before


@pytest.mark.parametrize("how", ["float32", "bfloat16", "checkpointed", "reentrant"])
def test_watched_training_is_unchanged_and_counts_once(watch, how, tmp_path):
    results = []
    for number, context in enumerate((contextlib.nullcontext, watch.record)):
        model = watch.model(tmp_path / str(number)).train()
        if how == "checkpointed" or (how == "reentrant" and watch.is_reentrant):
            enable_checkpointing(model, how == "reentrant")
        torch.manual_seed(0)  # of what is dropped
        with context(model) as recorded, torch.autocast("cpu", torch.bfloat16, enabled=how == "bfloat16"):
            loss = model(ROW, labels=ROW, use_cache=False, **watch.inputs).loss
            loss.backward()
        gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        results.append({"loss": loss, **gradients, **{f"state {key}": one for key, one in model.state_dict().items()}})
    plain, watched = results
    assert plain.keys() == watched.keys()
    assert any(watch.memory in name for name in plain)
    assert all(torch.equal(tensor, watched[name]) for name, tensor in plain.items())
    assert watch.tokens(recorded) == {5}


def test_generated_token_counts_once(watch, tmp_path):
    model = watch.model(tmp_path)
    with watch.record(model) as recorded:
        model.generate(ROW, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0, **watch.inputs)
    assert watch.tokens(recorded) == {5 + 3}, "the last token is not read"


@pytest.mark.parametrize("name", [name for name, watch in WATCHES.items() if watch.memory])
def test_offloaded_memory_is_refused(name):
    watch = WATCHES[name]
    model = watch.model(None)
    memories = {name: module for name, module in model.named_modules() if name.endswith(f".{watch.memory}")}
    path, last = list(memories.items())[-1]
    last.to("meta")
    before = hooks_and_attributes(model)
    message = rf"the memory of layer {path.split('.')[2]} is offloaded; expected its parameters on a device"
    with refused(message), watch.record(model):
        pass
    assert hooks_and_attributes(model) == before
