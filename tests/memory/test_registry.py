"""Layers of memories, found by their options, and what every layer has from its declaration."""

from dataclasses import dataclass

import pytest
import torch

from midus_hf.config.declared_tensors import ZEROS, DeclaredTensor, ModelSizes
from midus_hf.memories.hierarchical.options import HierarchicalOptions
from midus_hf.memories.hosting.sites import BehindLayer
from midus_hf.memories.midus.layer import MidusHmlMemory
from midus_hf.memories.midus.options import MidusHmlOptions
from midus_hf.memories.module import MemoryModule, build_memory, tensor_names
from midus_hf.memories.options import MemoryOptions, SharedTables
from midus_hf.memories.registry import MEMORY_TYPES, layer_class, register_layer

SIZES = ModelSizes(hidden_size=32, num_heads=4, head_dim=16, intermediate_size=48, num_layers=4)


def test_every_layer_has_its_declared_tensors():
    for name, options_class in MEMORY_TYPES.items():
        options = options_class()
        memory = build_memory(options, SIZES, 1, 3)
        declared = {tensor: value.shape for tensor, value in options.tensors(SIZES).items()}
        assert {tensor: tuple(value.shape) for tensor, value in memory.state_dict().items()} == declared, name
        assert set(tensor_names(memory, "buffer")) == {tensor for tensor, _ in memory.named_buffers()}, name
        shared = [tensor for tables in options.tables(SIZES, (0, 1)) for tensor in tables.tensors.values()]
        blocks = options.fetched(SIZES) if isinstance(options, HierarchicalOptions) else None
        fetched = [tensor for tensors in blocks.levels for tensor in tensors.values()] if blocks else []
        roles = {tensor.role for tensor in (*options.tensors(SIZES).values(), *shared, *fetched)}
        assert roles & {"value", "gate"} or name == "packs", name
        assert memory.__doc__, name


def test_second_layer_of_options_is_refused_unless_redefined(monkeypatch):
    class Rival(MemoryModule):
        """Another layer of the same options."""

    with pytest.raises(ValueError, match="MidusHmlOptions already has the layer MidusHmlMemory; choose other options"):
        register_layer(MidusHmlOptions)(Rival)
    assert MidusHmlOptions.layer is MidusHmlMemory
    monkeypatch.setattr(MidusHmlOptions, "layer", MidusHmlMemory)
    names = {"__qualname__": "MidusHmlMemory", "__module__": MidusHmlMemory.__module__}
    again = type("MidusHmlMemory", (MidusHmlMemory,), names)
    assert register_layer(MidusHmlOptions)(again) is again
    assert layer_class(MidusHmlOptions()) is again


def test_extended_options_need_a_separate_layer():
    @dataclass(kw_only=True)
    class WiderOptions(MidusHmlOptions):
        type = "wider"

    with pytest.raises(ValueError, match="'wider' has no layer; expected one in the module 'layer' next to Wider"):
        build_memory(WiderOptions(), SIZES)


@dataclass(kw_only=True)
class StrangeOptions(MemoryOptions):
    """Options of a memory behind the layer."""

    type = "strange"
    sites = ("behind-layer",)

    def tensors(self, sizes):
        return {"projection.weight": DeclaredTensor((2, 2), "projection", ZEROS)}


class Strange(MemoryModule):
    """Layer of this memory."""

    sites = (BehindLayer,)


class Secretive(Strange):
    def __init__(self, options, sizes):
        super().__init__(options, sizes)
        self.register_buffer("hidden_table", torch.zeros(2))


class Nowhere(Strange):
    """Leaves out the site of its options."""

    sites = ()


LEFT_OUT = r"needs {0}, which Strange\.services leaves out; expected its class of midus_hf\..* there"
NEEDS = {
    "WholeSequences": {"reads_ahead": True},
    "ScaledInitialisation": {"scales_initialisation": True},
    "Tables": {"tables": lambda self, sizes, layers: (SharedTables(layers, {}),)},
}


@pytest.mark.parametrize(
    ("layer", "changes", "message"),
    [
        (Secretive, {}, "has a tensor 'hidden_table', which StrangeOptions.tensors leaves out; expected"),
        (Nowhere, {}, r"needs behind-layer, which Nowhere\.sites leaves out"),
        *((Strange, changes, LEFT_OUT.format(service)) for service, changes in NEEDS.items()),
    ],
    ids=["tensor", "site", *NEEDS],
)
def test_layer_that_does_not_fit_its_options_is_refused(layer, changes, message, monkeypatch):
    options_class = type("Needy", (StrangeOptions,), changes) if changes else StrangeOptions
    monkeypatch.setattr(options_class, "layer", layer, raising=False)
    with pytest.raises(ValueError, match=message):
        build_memory(options_class(), SIZES)


def test_loaded_parameter_is_not_initialised_again():
    memory = build_memory(MEMORY_TYPES["midus-hml"](n=4, k=2), SIZES)
    filled = torch.nn.Parameter(torch.ones_like(memory.value_bank))
    filled._is_hf_initialized = True
    memory.value_bank = filled
    keys = memory.row_keys.clone()
    memory.reset_parameters()
    assert memory.value_bank.all()
    assert not torch.equal(memory.row_keys, keys)
