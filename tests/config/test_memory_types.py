"""Declarations of memory types: what is refused where they are registered, and that reading them costs nothing."""

import subprocess
import sys
from dataclasses import dataclass, fields

import pytest
import torch

from midus_hf.config.declared_tensors import ZEROS, DeclaredTensor
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.config.options import option
from midus_hf.memories.hierarchical.options import HierarchicalOptions
from midus_hf.memories.options import InsertedOptions, MemoryOptions, is_name
from midus_hf.memories.registry import MEMORY_TYPES, check_declaration, register_memory


@pytest.fixture(autouse=True)
def table():
    """The table of types, put back after the test."""
    before = dict(MEMORY_TYPES)
    yield MEMORY_TYPES
    MEMORY_TYPES.clear()
    MEMORY_TYPES.update(before)


@dataclass(kw_only=True)
class Example(InsertedOptions):
    """What a type needs at least."""

    sites = ("inserted",)
    size: int = option(3, "rows")

    def tensors(self, sizes):
        return {"table": DeclaredTensor((self.size, sizes.hidden_size), "value", ZEROS)}


def declaring(**tensors):
    """A type with these tensors."""
    return type("Declaring", (Example,), {"tensors": lambda self, sizes: tensors})


def test_a_registered_type_is_in_the_table_and_knows_its_name(table):
    assert register_memory("example")(Example) is Example
    assert table["example"] is Example and Example().type == "example"
    assert not (Example().output_projection or Example().inner_residual)


def test_a_name_that_is_taken_is_refused_unless_by_the_same_class_defined_again(table):
    with pytest.raises(
        ValueError, match="memory type 'headwise' is already registered by HeadwiseOptions; choose another"
    ):
        register_memory("headwise")(Example)
    rival = type("HeadwiseOptions", (Example,), {"__module__": "another_package"})
    with pytest.raises(ValueError, match="memory type 'headwise' is already registered by HeadwiseOptions"):
        register_memory("headwise")(rival)
    names = {"__qualname__": "HeadwiseOptions", "__module__": table["headwise"].__module__}
    again = type("HeadwiseOptions", (table["headwise"],), names)
    assert register_memory("headwise")(again) is again


@pytest.mark.parametrize("name", ["", "Example", "two words", "a.b", "a--b", "-a", "a-"])
def test_a_name_of_another_form_is_refused(name):
    with pytest.raises(ValueError, match=r"memory type is .*; expected lower case words joined by hyphens"):
        register_memory(name)


@dataclass(kw_only=True)
class Demanding(Example):
    """An option without a default."""

    width: int


@dataclass(kw_only=True)
class Misnamed(Example):
    """An option with a name that an entry has for itself."""

    name: str = option("x", "a name")


ROW = DeclaredTensor((4, 4), "value", ZEROS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (type("Nowhere", (Example,), {"sites": ()}), r"has sites = \(\); expected one or more of inserted"),
        (type("Elsewhere", (Example,), {"sites": ("outside",)}), r"has sites = \('outside',\); expected one or more of"),
        (
            type("Attached", (MemoryOptions,), {"sites": ("inserted",)}),
            "can be inserted; expected its options to extend InsertedOptions",
        ),
        (Demanding, r"cannot be built without options \(.*'width'\); give each a default"),
        (declaring(**{"a.b": ROW}), r"has a tensor 'a\.b'; expected a name without dots, or NAME\.weight"),
        (declaring(**{"a.b.weight": ROW}), r"has a tensor 'a\.b\.weight'; expected a name without dots"),
        (declaring(values=ROW), "has a tensor 'values', a name that dictionaries have for a method, which PEFT cannot wrap"),
        (declaring(**{"keys.weight": ROW}), r"has a tensor 'keys\.weight', a name that dictionaries have"),
        (
            declaring(**{"map.weight": DeclaredTensor((4, 4), "buffer", ZEROS)}),
            r"gives map\.weight the role 'buffer'; expected a parameter",
        ),
        (
            declaring(codes=DeclaredTensor((4, 4), "value", ZEROS, dtype="int8")),
            "gives codes the role 'value' and the dtype int8; expected the role 'buffer', since integers do not train",
        ),
        (Misnamed, "has the option 'name', which says what or where a memory is; choose another name"),
        (declaring(table=DeclaredTensor((4,), "bank", ZEROS)), "gives table the role 'bank'; expected one of key, value"),
    ],
)  # fmt: skip
def test_a_declaration_that_cannot_be_built_is_refused(options, message):
    with pytest.raises(ValueError, match=f"memory type 'example' .*{message}"):
        register_memory("example")(options)


def test_a_type_must_say_which_tensors_it_and_its_blocks_have():
    with pytest.raises(TypeError, match="Silent does not say which tensors it has"):
        register_memory("silent")(type("Silent", (InsertedOptions,), {"sites": ("inserted",)}))
    with pytest.raises(TypeError, match="HierarchicalOptions does not say which tensors a block has"):
        HierarchicalOptions().fetched(ModelSizes(hidden_size=8, num_heads=2))


def test_every_type_of_the_package_passes_the_check_of_those_of_other_packages_and_has_texts():
    assert len(MEMORY_TYPES) == 13
    for name, options in MEMORY_TYPES.items():
        check_declaration(name, options)
        assert options.__doc__ and options.sites, name
        assert all(field.metadata["help"] for field in fields(options)), name


def test_declarations_are_read_and_counted_without_torch_and_transformers():
    code = (
        "import sys, midus_hf.memories.entries, midus_hf.memories.flops, midus_hf.memories.registry as m; "
        "print(*m.MEMORY_TYPES, *{'torch', 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert set(done.stdout.split()) == set(MEMORY_TYPES)


def test_words_of_torch_modules_are_those_that_a_container_has():
    names = {name for name in dir(torch.nn.ModuleDict()) if not name.startswith("_") and "_" not in name}
    assert {name for name in names if is_name(name)} == set()
