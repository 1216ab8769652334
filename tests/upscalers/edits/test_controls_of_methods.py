"""The null controls of every method that gives a memory: each is the base at the start, and trains what it should."""

import pytest
import torch

from midus_hf.memories.controls import controls_of
from midus_hf.training.optim.freezing import set_trainable
from tests.upscalers.checkpoints import config_of, load, logits
from tests.upscalers.dense.requests import upscaled_config
from tests.upscalers.methods import KINDS
from upscalers.architecture.layout import layout_of
from upscalers.runs.upscale import upscale

METHODS = {method: KINDS[method]["options"] for method in ("midus-hml", "midus-pkm", "midus-linear", "moc")}
# Those whose memories retrieve rows, and small sizes.
METHODS["ultramem-v2"] = KINDS["ultramem-v2, ring"]["options"]


def controls(base, method):
    """The controls of the one memory that a method gives a base."""
    config = upscaled_config(config_of(base), method, options=METHODS[method])
    memories = layout_of(config).memories
    (entry,) = memories.entries
    return controls_of(entry.options, memories.sizes, entry.layers)


@pytest.mark.parametrize("control", ["one-row", "random-slots"])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_control_by_options_computes_what_the_base_computes(method, control, family, shared_base, tmp_path):
    base = shared_base(family)
    usual = upscale(base=base, method=method, options=METHODS[method], dry_run=True)
    change = controls(base, method)[control]
    options = {**METHODS[method], **change.options}
    report = upscale(base=base, method=method, output=tmp_path / "out", options=options)
    assert report.identity.checked == "logits" and report.identity.max_abs_diff == 0.0
    assert torch.equal(logits(tmp_path / "out"), logits(base))
    (entry,) = config_of(tmp_path / "out")["memory"]
    assert {key: entry[key] for key in change.options} == dict(change.options)
    same_size = report.parameters.new == usual.parameters.new
    assert same_size == (control == "random-slots")


@pytest.mark.parametrize("method", sorted(METHODS))
def test_with_frozen_addresses_what_makes_values_trains_and_moves(method, family, shared_base, tmp_path):
    upscale(base=shared_base(family), method=method, output=tmp_path / "out", options=METHODS[method], verify=False)
    change = controls(shared_base(family), method)["frozen-addresses"]
    model = load(tmp_path / "out").train()
    set_trainable(model, list(change.trainable))
    training = {name.rpartition(".memor")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert training and not any("keys" in name or "router" in name for name in training)
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    tokens = torch.arange(3, 27).view(1, -1)
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved and all(p.requires_grad for name, p in model.named_parameters() if name in moved)
    assert any("bank" in name or "table" in name for name in moved)
