"""How many parameters the blocks add, and what their tensors are called."""

import pytest
import torch
from models.upscaled import upscaled_model
from transformers import PreTrainedModel

from midus_hf.memory.registry import MEMORY_MODULES, MemoryModule
from midus_hf.models.families.llama import MidusLlamaConfig, MidusLlamaForCausalLM

LLAMA_3_2_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
LLAMA_3_1_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}


def with_blocks(base: dict, blocks: int) -> PreTrainedModel:
    """A model without data: a block after every second layer of the base, with the paper's n = 64 and k = 4."""
    layers = base["num_hidden_layers"] + blocks
    memory = [{"type": "headwise", "layers": [3 * block + 2 for block in range(blocks)]}]
    with torch.device("meta"):
        return MidusLlamaForCausalLM(MidusLlamaConfig(**{**base, "num_hidden_layers": layers}, memory=memory))


@pytest.mark.parametrize(
    "base, blocks, new, total",
    [(LLAMA_3_2_1B, 8, 54_542_336, 1_290_356_736), (LLAMA_3_1_8B, 16, 423_690_240, 8_453_951_488)],
    ids=["llama-3.2-1b", "llama-3.1-8b"],
)
def test_blocks_have_as_many_parameters_as_the_paper_says(base, blocks, new, total):
    model = with_blocks(base, blocks)
    blocks_alone = [layer for layer in model.model.layers if hasattr(layer, "memory")]
    assert len(blocks_alone) == blocks
    assert sum(parameter.numel() for layer in blocks_alone for parameter in layer.parameters()) == new
    assert model.num_parameters() == total
    slots = sum(layer.memory.num_heads * layer.memory.n**2 for layer in blocks_alone)
    assert slots == 32 * 64**2 * blocks  # about 1M and 2M, section 5.1


def test_no_parameter_is_named_as_a_method_of_dictionaries(family):
    methods = set(dir(torch.nn.ParameterDict)) | set(dir(dict))
    for name, _ in upscaled_model(family).named_parameters():
        assert not methods & set(name.split(".")[-1:]), name


def test_tables_are_parameters_of_the_memory_itself(family):
    """Offloading and sharding hooks move a module's own parameters before its forward, not those of its children."""
    for module in upscaled_model(family).modules():
        if isinstance(module, MemoryModule):
            assert not list(module.children())
            assert set(module.names_of("key", "value")) < {name for name, _ in module.named_parameters()}
            assert type(module) in MEMORY_MODULES.values()


def test_new_tensors_are_named_beside_those_of_the_base(family):
    model = upscaled_model(family)
    block = {name.removeprefix("model.layers.1.") for name in model.state_dict() if name.startswith("model.layers.1.")}
    donor = {name.removeprefix("model.layers.2.") for name in model.state_dict() if name.startswith("model.layers.2.")}
    memory = {f"memory.{name}" for name in ("row_keys", "column_keys", "value_bank", "value_transform")}
    projections = {name for name in donor if name.startswith("self_attn.") and "o_proj" not in name}
    assert block == {*projections, "input_layernorm.weight", *memory}
