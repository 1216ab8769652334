"""Declarations of memory types: what is refused where they are registered, null controls, and that reading them costs nothing."""

import subprocess
import sys
from dataclasses import dataclass, fields, make_dataclass, replace

import pytest
import torch

from midus_hf.config.declared_tensors import ONES, ZEROS, DeclaredTensor, ModelSizes
from midus_hf.config.errors import RequestError
from midus_hf.config.options import option
from midus_hf.memories.controls import Change, controls_of, num_value_rows
from midus_hf.memories.flops import memory_flops
from midus_hf.memories.options import InsertedOptions
from midus_hf.memories.registry import MEMORY_TYPES, check_declaration, register_memory

SIZES = ModelSizes(hidden_size=32, num_heads=4, intermediate_size=48, num_layers=4)
TABLES = ("value_table", "pre_value_table")


@pytest.fixture(autouse=True)
def table():
    """The table of types, put back after the test."""
    before = dict(MEMORY_TYPES)
    yield MEMORY_TYPES
    MEMORY_TYPES.clear()
    MEMORY_TYPES.update(before)


@dataclass(kw_only=True)
class Example(InsertedOptions):
    """A type of another package, which declares no control."""

    sites = ("inserted",)
    size: int = option(3, "rows")

    def __post_init__(self):
        if self.size < 1:
            raise RequestError(f"size is {self.size}; expected one or more.")

    def tensors(self, sizes):
        return {
            "down": DeclaredTensor((self.size, sizes.hidden_size), "key", ONES),
            "up": DeclaredTensor((self.size, sizes.hidden_size), "value", ZEROS),
        }


def declaring(**tensors):
    """A type with these tensors."""
    return type("Declaring", (Example,), {"tensors": lambda self, sizes: tensors})


def test_registered_type_is_listed_by_its_name(table):
    assert register_memory("example")(Example) is Example
    assert table["example"] is Example and Example().type == "example"
    assert not (Example().output_projection or Example().inner_residual)


def test_taken_type_name_is_refused_to_another_class(table):
    rival = type("MidusHmlOptions", (Example,), {"__module__": "another_package"})
    for other in (Example, rival):
        with pytest.raises(ValueError, match="'midus-hml' is already registered by MidusHmlOptions; choose another"):
            register_memory("midus-hml")(other)
    names = {"__qualname__": "MidusHmlOptions", "__module__": table["midus-hml"].__module__}
    again = type("MidusHmlOptions", (table["midus-hml"],), names)
    assert register_memory("midus-hml")(again) is again


def test_malformed_type_name_is_refused():
    of_modules = {name for name in dir(torch.nn.ModuleDict()) if not name.startswith("_") and "_" not in name}
    for name in ("", "Example", "two words", "a.b", "a--b", "-a", "a-", *of_modules):
        with pytest.raises(ValueError, match=r"memory type is .*; expected lower case words joined by hyphens"):
            register_memory(name)


def extended(*field):
    """A type with one more option: its name, its type, and its default if it has one."""
    return make_dataclass("Extended", [field], bases=(Example,), kw_only=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (type("Nowhere", (Example,), {"sites": ()}), r"has sites = \(\); expected one or more of inserted"),
        (type("Elsewhere", (Example,), {"sites": ("outside",)}), r"has sites = \('outside',\); expected one or more of"),
        (declaring(**{"map.weight": DeclaredTensor((4, 4), "buffer", ZEROS)}), r"gives map\.weight the role 'buffer'; expected a"),
        (declaring(codes=DeclaredTensor((4, 4), "value", ZEROS, dtype="int64")), ".* 'value' and the dtype int64; expected the role"),
        (extended("name", str, "x"), "has the option 'name', which says what or where a memory is; choose another name"),
        (declaring(table=DeclaredTensor((4,), "bank", ZEROS)), "gives table the role 'bank'; expected one of key, value"),
    ],
)  # fmt: skip
def test_misleading_declaration_is_refused(options, message):
    with pytest.raises(ValueError, match=f"^memory type 'example' {message}"):
        register_memory("example")(options)


def test_own_types_pass_the_check_of_plugins():
    assert len(MEMORY_TYPES) == 13
    for name, options in MEMORY_TYPES.items():
        check_declaration(name, options)
        assert options.__doc__ and options.sites, name
        assert all(field.metadata["help"] for field in fields(options)), name


def test_types_and_flops_import_no_torch():
    code = (
        "import sys, midus_hf.memories.flops, midus_hf.memories.registry as m; "
        "print(*m.MEMORY_TYPES, *{'torch', 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert set(done.stdout.split()) == set(MEMORY_TYPES)


@pytest.mark.parametrize(
    ("memory_type", "options", "trained", "shuffled"),
    [
        ("midus-hml", {}, ("value", "transform"), ("value_bank",)),
        ("midus-linear", {}, ("value",), ("value_bank",)),
        ("engram", {}, ("value", "transform"), ("value_table",)),
        ("ultramem-v2", {}, ("value",), TABLES),
        ("ultramem-v2", {"share": "ring:4"}, ("value",), TABLES),
        ("ultramem-v2", {"zero": "projection"}, (), TABLES),  # a projection that is frozen at zero
        ("moc", {"share": "all"}, ("value", "projection"), ("bank",)),
    ],
)
def test_controls_follow_from_tensors(memory_type, options, trained, shuffled):
    controls = controls_of(MEMORY_TYPES[memory_type](**options), SIZES)
    assert controls.pop("one-row") and controls.pop("random-slots") == Change(options={"addressing": "random"})
    of_roles = {"frozen-addresses": Change(trainable=trained), "shuffled-addresses": Change(shuffled=shuffled)}
    assert controls == {name: change for name, change in of_roles.items() if change != Change()}


def test_only_memories_with_addressing_have_controls():
    choosing = {name for name, cls in MEMORY_TYPES.items() if "addressing" in {field.name for field in fields(cls)}}
    assert {name for name, cls in MEMORY_TYPES.items() if controls_of(cls(), SIZES)} == choosing
    assert choosing == {"moc", "midus-hml", "midus-linear", "engram", "midus-pkm", "ultramem-v2"}
    options = MEMORY_TYPES["ultramem-v2"](share="ring:5")
    with pytest.raises(ValueError, match="share is 'ring:5', but 4 layers have the memory"):
        controls_of(options, SIZES)
    assert len(controls_of(options, SIZES, (0, 1, 2, 3, 4))) == 4


ONE_ROW = [
    ("midus-hml", {}, {"value_bank": (1, 8)}),
    ("midus-pkm", {}, {"value_bank": (1, 32)}),
    ("moc", {}, {"bank": (1, 32)}),
]
ONE_ROW += [
    ("ultramem-v2", {"share": share}, {"value_table": (1, 6), "pre_value_table": (1, 2)}) for share in ("none", "all", "ring:4")
]  # fmt: skip


@pytest.mark.parametrize(("memory_type", "options", "rows"), ONE_ROW)
def test_one_row_control_has_one_row(memory_type, options, rows):
    options = MEMORY_TYPES[memory_type](**options)
    options = replace(options, **controls_of(options, SIZES)["one-row"].options)
    tables = [shared.tensors for shared in options.tables(SIZES, (0, 1, 2, 3))]
    for tensors in tables or [options.tensors(SIZES)]:
        assert {name: tensor.shape for name, tensor in tensors.items() if tensor.role == "value"} == rows
    assert len(tables) == (memory_type == "moc") and "shuffled-addresses" not in controls_of(options, SIZES)


@pytest.mark.parametrize("memory_type", ["moc", "midus-hml", "midus-linear", "midus-pkm", "ultramem-v2"])
def test_addressing_keeps_tensors_and_flops(memory_type):
    content, random = (MEMORY_TYPES[memory_type](addressing=addressing) for addressing in ("content", "random"))
    assert content == MEMORY_TYPES[memory_type]()
    assert content.tensors(SIZES) == random.tensors(SIZES)
    assert content.tables(SIZES, (0, 1)) == random.tables(SIZES, (0, 1))
    assert memory_flops(content, SIZES, 2, 8, 0, 2) == memory_flops(random, SIZES, 2, 8, 0, 2)


def test_plugin_type_has_controls_by_roles():
    frozen, shuffled = Change(trainable=("value",)), Change(shuffled=("up",))
    assert controls_of(Example(), SIZES) == {"frozen-addresses": frozen, "shuffled-addresses": shuffled}
    controlled = type("Controlled", (Example,), {"controls": {"one-row": {"size": 1}}})
    declared = register_memory("example")(controlled)
    assert controls_of(declared(), SIZES)["one-row"] == Change(options={"size": 1})
    alone = declaring(up=DeclaredTensor((3, 32), "value", ZEROS))  # no address that could be frozen
    for roles in (("value",), ("value", "transform")):
        alone.value_roles = roles
        assert controls_of(alone(), SIZES) == {"shuffled-addresses": shuffled}
    shapes = {((5,), "value"): 0, ((5, 2), "key"): 0, ((3, 5, 2), "value"): 5}
    assert {key: num_value_rows(DeclaredTensor(*key, ZEROS)) for key in shapes} == shapes
