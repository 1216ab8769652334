"""What the tensors of new memory blocks are: copies of the base's attention, and what each memory starts as."""

import pytest
import torch

from tests.upscalers.checkpoints import SMALL_MEMORY, read_tensors, save_base
from tests.upscalers.methods import KINDS
from upscalers.runs.upscale import upscale


def test_a_new_block_holds_the_attention_and_norm_of_the_next_layer_and_zero_values(family, shared_base, tmp_path):
    base = shared_base(family)
    upscale(base=base, method="midus-hml", output=tmp_path / "out", options=SMALL_MEMORY, placement="1,5")
    old, new = read_tensors(base), read_tensors(tmp_path / "out")
    for index, donor in ((1, 1), (5, 3)):
        block = {name: new[name] for name in new if name.startswith(f"model.layers.{index}.")}
        copied = {name.removeprefix(f"model.layers.{index}.") for name in block if ".memory." not in name}
        assert {"self_attn.q_proj.weight", "input_layernorm.weight"} <= copied
        for name in copied:
            assert torch.equal(new[f"model.layers.{index}.{name}"], old[f"model.layers.{donor}.{name}"])
        memory = {name.rpartition(".")[2]: tensor for name, tensor in block.items() if ".memory." in name}
        assert not memory.pop("value_bank").any()
        assert all((tensor != 0).float().mean() > 0.99 for tensor in memory.values())
    assert not torch.equal(new["model.layers.1.memory.row_keys"], new["model.layers.5.memory.row_keys"])


@pytest.mark.parametrize("kind", ["midus-pkm", "midus-linear", "midus-hml, output projection"])
def test_a_block_that_keeps_the_output_projection_holds_it_and_the_norm_behind_it(family, tmp_path, kind):
    base = save_base(tmp_path / "base", family, **({} if family == "qwen2" else {"attention_bias": True}))
    upscale(base=base, output=tmp_path / "out", placement="1,5", **KINDS[kind])
    old, new = read_tensors(base), read_tensors(tmp_path / "out")
    wanted = {"self_attn.o_proj.weight", "input_layernorm.weight"}
    wanted |= {"self_attn.o_proj.bias"} if family != "qwen2" else set()
    wanted |= {"post_attention_layernorm.weight"} if family.startswith("gemma") else set()
    for index, donor in ((1, 1), (5, 3)):
        names = [name for name in new if name.startswith(f"model.layers.{index}.")]
        copied = {name.removeprefix(f"model.layers.{index}.") for name in names if ".memory." not in name}
        assert wanted <= copied
        assert ("post_attention_layernorm.weight" in copied) == family.startswith("gemma")
        for name in copied:
            assert torch.equal(new[f"model.layers.{index}.{name}"], old[f"model.layers.{donor}.{name}"])


def test_tensors_of_a_memory_start_as_the_class_says(tmp_path):
    base = save_base(tmp_path / "base", hidden_size=64, num_attention_heads=2)
    options = {"n": 16, "k": 2, "gate": "token"}
    upscale(base=base, method="midus-pkm", output=tmp_path / "out", options=options, placement="1,3")
    tensors = read_tensors(tmp_path / "out")
    first, second = ({n.rpartition("memory.")[2]: tensors[n] for n in tensors if f".{i}.memory." in n} for i in (1, 3))
    for zero in ("value_bank", "query_norm_bias", "query_mean", "gate_weight", "gate_bias"):
        assert not first[zero].any()
    for one in ("query_norm_weight", "query_variance"):
        assert torch.equal(first[one], torch.ones(2, 32))
    assert first["query_projection.weight"].std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert 0.24 < first["row_keys"].abs().max() <= 0.25
    for random in ("query_projection.weight", "row_keys", "column_keys"):
        assert not torch.equal(first[random], second[random])
