"""The method moda: what verification finds, the names of its tensors, and plans that it cannot follow."""

import pytest
import torch

from tests.upscalers.checkpoints import config_of, logits, read_tensors, unverified
from tests.upscalers.methods import KINDS, trained
from upscalers.request.errors import VerificationError
from upscalers.runs.inspection import inspect_checkpoint
from upscalers.runs.upscale import upscale
from upscalers.tensors.recipes import Fill


def test_a_layer_checked_alone_shows_values_that_are_added_and_do_not_start_at_zero(base, tmp_path, monkeypatch):
    message = (
        "new memory 'depth-attention' of layer 0 gives later layers ffn_value other than zero; expected zero until"
    )
    monkeypatch.setattr(
        "upscalers.methods.memory_methods.initialised",
        lambda tensor, *_: Fill(tensor.shape, 0.1 if tensor.role == "projection" else 0.0),
    )
    with pytest.raises(VerificationError, match=message):
        upscale(base=base, method="moda", output=tmp_path / "out", verify=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (
            "moda",
            {0: {"ffn_key.weight", "ffn_value.weight"}, 1: {"depth_gate", "ffn_key.weight", "ffn_value.weight"}},
        ),
        ("moda, attention", {0: set(), 1: {"depth_gate"}}),
        ("moda, some", {0: {"ffn_key.weight", "ffn_value.weight"}, 1: set()}),
        (
            "moda, bias",
            {0: {f"ffn_{part}{end}" for part in ("key", "value") for end in (".weight", "_bias")}},
        ),
        (
            "moda, projected",
            {
                0: {
                    f"{source}_{part}{end}"
                    for source in ("attention", "ffn")
                    for part in ("key", "value")
                    for end in (".weight", "_bias")
                }
            },
        ),
    ],
)
def test_tensors_have_their_names_and_nothing_is_stored_that_nothing_reads(kind, found, base, tmp_path):
    upscale(base=base, output=tmp_path / "out", verify=False, **KINDS[kind])
    tensors = read_tensors(tmp_path / "out")
    for layer, names in {**found, 3: {"depth_gate"}}.items():
        prefix = f"model.layers.{layer}.memories.depth-attention."
        assert {name.removeprefix(prefix) for name in tensors if name.startswith(prefix)} == names
    new = {name: tensor for name, tensor in tensors.items() if ".memories." in name}
    told = inspect_checkpoint(tmp_path / "out")
    assert told["parameters"]["new"] == sum(tensor.numel() for tensor in new.values())
    for name, tensor in new.items():
        shape = (4,) if name.endswith("depth_gate") else (16,) if name.endswith("bias") else (16, 32)
        assert tensor.shape == shape and tensor.any().item() == name.endswith("_key.weight")


def test_every_layer_but_inserted_blocks_reads_the_depth(base, tmp_path):
    once = unverified(base, tmp_path / "once", placement="1,4")
    upscale(base=once, method="moda", output=tmp_path / "twice", verify=False)
    below, entry = config_of(tmp_path / "twice")["memory"]
    assert (below["layers"], entry["type"], entry["layers"]) == ([1, 4], "depth-attention", [0, 2, 3, 5])


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("solar", ()),
        ("slices", ("slices=[{layers: [0, 3]}, {layers: [1, 4]}]",)),
        ("slices", ("slices=[{layers: [1, 4]}]",)),
        ("slices", ("slices=[{layers: [2, 4]}, {layers: [0, 2]}]",)),
    ],
    ids=["solar", "repeats", "leaves-out", "reorders"],
)
def test_a_plan_that_repeats_leaves_out_or_reorders_its_layers_is_refused(method, options, base, command, tmp_path):
    upscale(base=base, method="moda", output=tmp_path / "once", verify=False)
    words = [word for option in options for word in ("--set", option)]
    done = command("--base", tmp_path / "once", "--method", method, "--output", tmp_path / "out", *words)
    assert done.status == 2 and len(done.err.strip().splitlines()) == 1
    assert (
        "memory 'depth-attention' ties layers 0, 1, 2, 3 together, and the plan repeats or leaves out some of them; expected "
        "each once. Choose a method that inserts layers." in done.err
    )
    assert not (tmp_path / "out").exists()


def test_a_second_one_in_the_same_layers_is_refused_and_in_others_is_not(base, command, tmp_path):
    options = {"layers": [0, 1]}
    upscale(base=base, method="moda", output=tmp_path / "new", options=options, verify=False)
    once = trained(tmp_path / "new", tmp_path / "once")
    done = command("--base", once, "--method", "moda", "--output", tmp_path / "out")
    assert done.status == 2 and len(done.err.strip().splitlines()) == 1
    assert "memories 'depth-attention' and 'depth-attention-2' both attend in the place of layer 0's own" in done.err
    upscale(base=once, method="moda", output=tmp_path / "out", options={"layers": [2, 3]})
    assert torch.equal(logits(tmp_path / "out"), logits(once))
    both = logits(trained(tmp_path / "out", tmp_path / "both"))
    assert not torch.allclose(both, logits(once), atol=1e-3)
