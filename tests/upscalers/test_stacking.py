"""An upscaled model is upscaled again: identity, memory entries and earlier memories survive."""

import pytest
import torch

from tests.upscalers.checkpoints import (
    SMALL,
    config_of,
    logits,
    read_tensors,
    same_bits,
    with_memory,
)
from tests.upscalers.methods import trained
from upscalers.request.errors import RequestError
from upscalers.runs.upscale import upscale


def test_a_block_whose_neighbour_is_a_block_takes_the_attention_of_that_block(family, shared_base, tmp_path):
    with_memory(shared_base(family), tmp_path / "once", placement="0,5", verify=False)
    once = trained(tmp_path / "once", tmp_path / "trained")
    with_memory(once, tmp_path / "twice", placement="0,7", verify=False)
    old, new = read_tensors(once), read_tensors(tmp_path / "twice")
    for index, donor in ((0, 0), (7, 5)):
        names = {
            name.removeprefix(f"model.layers.{index}.") for name in new if name.startswith(f"model.layers.{index}.")
        }
        assert not any("o_proj" in name or "mlp" in name for name in names)
        for name in names:
            if ".memory." not in f".{name}":
                assert same_bits(new[f"model.layers.{index}.{name}"], old[f"model.layers.{donor}.{name}"])
    assert not new["model.layers.0.memory.value_bank"].any()
    assert new["model.layers.1.memory.value_bank"].any()


@pytest.mark.parametrize("method", ["midus-pkm", "midus-linear"])
def test_where_the_neighbour_has_no_output_projection_the_attention_comes_from_further_off(
    family, shared_base, tmp_path, method
):
    with_memory(
        shared_base(family), tmp_path / "once", placement="0,3,6", verify=False
    )  # beside 1, between 2 and 4, beside 5
    output = tmp_path / "twice"
    upscale(base=tmp_path / "once", method=method, output=output, options=SMALL[method], placement="0,4,9")
    plan = config_of(output)["upscale"]["plan"]
    assert [plan[index]["sources"] for index in (0, 4, 9)] == [[1], [4], [5]]
    old, new = read_tensors(tmp_path / "once"), read_tensors(output)
    for index, donor in ((0, 1), (4, 4), (9, 5)):
        name = "self_attn.o_proj.weight"
        assert same_bits(new[f"model.layers.{index}.{name}"], old[f"model.layers.{donor}.{name}"])
    assert torch.equal(logits(shared_base(family)), logits(output))


def test_a_base_without_any_output_projection_is_refused(base, tmp_path):
    with_memory(base, tmp_path / "once", placement="0")
    upscale(
        base=tmp_path / "once", method="slices", output=tmp_path / "bare", options={"slices": [{"layers": [0, 1]}]}
    )
    with pytest.raises(
        RequestError, match=r"new layer 0 needs an attention with an output projection.*Choose midus-hml"
    ):
        upscale(base=tmp_path / "bare", method="midus-pkm", placement="0", dry_run=True)
