"""The table of memory modules, and what every module has from its declaration."""

from dataclasses import dataclass

import pytest
import torch

from midus_hf.config.declared_tensors import ZEROS, DeclaredTensor
from midus_hf.config.memories import MEMORY_TYPES
from midus_hf.config.memory_types import MemoryOptions
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memory.headwise import HeadwiseMemory
from midus_hf.memory.registry import MEMORY_MODULES, MemoryModule, build_memory, check_module, register_memory

SIZES = ModelSizes(hidden_size=32, num_heads=4, head_dim=16, intermediate_size=48, num_layers=4)


@pytest.fixture
def table():
    """The table of modules, put back after the test."""
    before = dict(MEMORY_MODULES)
    yield MEMORY_MODULES
    MEMORY_MODULES.clear()
    MEMORY_MODULES.update(before)


def test_every_type_has_a_module_of_the_declared_tensors():
    assert MEMORY_MODULES.keys() == MEMORY_TYPES.keys()
    for name, options_class in MEMORY_TYPES.items():
        options = options_class()
        check_module(name, MEMORY_MODULES[name])
        memory = build_memory(options, SIZES, 1, 3)
        declared = {tensor: value.shape for tensor, value in options.tensors(SIZES).items()}
        assert {tensor: tuple(value.shape) for tensor, value in memory.state_dict().items()} == declared
        assert set(memory.names_of("buffer")) == {tensor for tensor, _ in memory.named_buffers()}
        shared = [tensor for tables in options.tables(SIZES, (0, 1)) for tensor in tables.tensors.values()]
        blocks = options.fetched(SIZES)
        fetched = [tensor for tensors in blocks.levels for tensor in tensors.values()] if blocks else []
        roles = {tensor.role for tensor in (*options.tensors(SIZES).values(), *shared, *fetched)}
        assert roles & {"value", "gate"} and memory.__doc__, name


def test_a_type_that_has_a_module_is_refused_another(table):
    class Rival(MemoryModule):
        """Another module of the same type."""

    with pytest.raises(
        ValueError, match="memory type 'headwise' already has the module HeadwiseMemory; choose another"
    ):
        register_memory("headwise")(Rival)
    assert table["headwise"] is HeadwiseMemory


def test_a_class_that_is_defined_again_takes_its_own_name_again(table):
    names = {"__qualname__": "HeadwiseMemory", "__module__": HeadwiseMemory.__module__}
    again = type("HeadwiseMemory", (HeadwiseMemory,), names)
    assert register_memory("headwise")(again) is again
    assert table["headwise"] is again


def test_a_module_without_a_declared_type_is_refused():
    with pytest.raises(
        ValueError,
        match="memory type 'exemple' has a module, Stray, but no options; expected one of chapters, depth-attention, headwise",
    ):
        register_memory("exemple")(type("Stray", (MemoryModule,), {}))


@pytest.mark.parametrize("name", ["options", "declared", "context", "type", "forward", "training"])
def test_a_tensor_with_the_name_of_something_that_modules_have_is_refused(name, table, monkeypatch):
    @dataclass(kw_only=True)
    class Named(MemoryOptions):
        sites = ("behind-layer",)

        def tensors(self, sizes):
            return {f"{name}.weight": DeclaredTensor((2, 2), "projection", ZEROS)}

    monkeypatch.setitem(MEMORY_TYPES, "named", Named)
    with pytest.raises(
        ValueError, match=f"has a tensor '{name}', the name of something that every module of a memory"
    ):
        register_memory("named")(type("NamedMemory", (MemoryModule,), {}))
    assert "named" not in table


def test_a_tensor_that_is_not_declared_is_refused(table):
    class Secretive(MEMORY_MODULES["linear"]):
        def __init__(self, options, sizes):
            super().__init__(options, sizes)
            self.register_buffer("hidden_table", torch.zeros(2))

    table["linear"] = Secretive
    with pytest.raises(
        ValueError, match=r"has a tensor 'hidden_table', which LinearOptions.tensors leaves out; expected"
    ):
        build_memory(MEMORY_TYPES["linear"](), SIZES)


def test_a_module_that_reads_the_weight_of_a_linear_layer_is_refused(table):
    class ReadsWeight(MEMORY_MODULES["linear"]):
        def forward(self, attention_output, residual=None):
            return attention_output @ self.query_projection.weight.T

    del table["linear"]
    with pytest.raises(
        ValueError, match=r"reads self\.query_projection\.weight; expected self\.query_projection\(\.\.\.\)"
    ):
        register_memory("linear")(ReadsWeight)
    assert "linear" not in table


def test_a_type_without_a_module_is_refused_where_one_is_built(table):
    del table["linear"]
    with pytest.raises(
        ValueError, match="memory type 'linear' has no module; expected one of chapters, depth-attention, headwise, "
    ):
        build_memory(MEMORY_TYPES["linear"](), SIZES)


def test_a_memory_that_does_not_fit_the_model_is_refused():
    with pytest.raises(ValueError, match="hidden_size is 33; expected a multiple of the 4 attention heads"):
        build_memory(MEMORY_TYPES["linear"](), ModelSizes(hidden_size=33, num_heads=4))


def test_what_a_checkpoint_has_filled_is_not_initialised_again():
    memory = build_memory(MEMORY_TYPES["headwise"](n=4, k=2), SIZES)
    filled = torch.nn.Parameter(torch.ones_like(memory.value_bank))
    filled._is_hf_initialized = True
    memory.value_bank = filled
    keys = memory.row_keys.clone()
    memory.reset_parameters()
    assert memory.value_bank.all() and not torch.equal(memory.row_keys, keys)
