"""Null controls: which a type of memory has, what follows from the roles of its tensors, and what is refused of a declaration."""

from dataclasses import dataclass, fields, replace

import pytest

from midus_hf.config.declared_tensors import ONES, ZEROS, DeclaredTensor
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.config.options import option
from midus_hf.memories.controls import Change, controls_of, num_value_rows
from midus_hf.memories.flops import memory_flops
from midus_hf.memories.options import MemoryOptions
from midus_hf.memories.registry import MEMORY_TYPES, register_memory

SIZES = ModelSizes(hidden_size=32, num_heads=4, intermediate_size=48, num_layers=4)
ALL = ["one-row", "random-slots", "frozen-addresses", "shuffled-addresses"]
NONE = ("depth-attention", "hier-ffn", "hier-kv", "hier-lora-ffn", "hier-lora-qk", "hier-lora-vo")


def of(memory_type, **options):
    """The controls of a type with some options."""
    return controls_of(MEMORY_TYPES[memory_type](**options), SIZES)


@pytest.fixture(autouse=True)
def table():
    """The table of types, put back after the test."""
    before = dict(MEMORY_TYPES)
    yield
    MEMORY_TYPES.clear()
    MEMORY_TYPES.update(before)


@pytest.mark.parametrize("memory_type", ["chapters", "headwise", "linear", "product-key", "ultramem"])
def test_memories_that_retrieve_rows_have_every_control(memory_type):
    assert list(of(memory_type)) == ALL


@pytest.mark.parametrize("memory_type", NONE)
def test_memories_that_keep_no_rows_in_the_checkpoint_have_none(memory_type):
    assert of(memory_type) == {}


@pytest.mark.parametrize(
    ("memory_type", "rows"),
    [
        ("headwise", {"value_bank": (1, 8)}),
        ("product-key", {"value_bank": (1, 32)}),
        ("linear", {"value_bank": (1, 32)}),
        ("ultramem", {"value_table": (1, 6), "pre_value_table": (1, 2)}),
    ],
)
def test_a_memory_of_one_row_has_one(memory_type, rows):
    options = MEMORY_TYPES[memory_type](**of(memory_type)["one-row"].options)
    tensors = options.tensors(SIZES)
    assert {name: tensor.shape for name, tensor in tensors.items() if tensor.role == "value"} == rows
    assert "shuffled-addresses" not in controls_of(options, SIZES)


def test_a_bank_of_one_row_is_one_chapter():
    options = MEMORY_TYPES["chapters"](**of("chapters")["one-row"].options)
    ((bank,),) = [shared.tensors.values() for shared in options.tables(SIZES, (0, 1))]
    assert bank.shape == (1, 32) and options.routed_chapters == options.k == 1


@pytest.mark.parametrize("share", ["all", "ring:4"])
def test_one_row_is_left_of_tables_that_layers_share(share):
    options = replace(MEMORY_TYPES["ultramem"](share=share), **of("ultramem")["one-row"].options)
    assert options.num_rows == 1 and options.tables(SIZES, (0, 1, 2, 3)) == ()


@pytest.mark.parametrize(
    ("memory_type", "options", "change"),
    [
        ("headwise", {}, Change(trainable=("value", "transform"))),
        ("product-key", {}, Change(trainable=("value",))),
        ("linear", {}, Change(trainable=("value",))),
        ("ultramem", {}, Change(trainable=("value",))),
        ("chapters", {}, Change(trainable=("value", "projection"))),
        ("ultramem", {"zero": "projection"}, None),  # a projection that is frozen at zero
        ("chapters", {"bank_bits": 8}, None),  # no values that train
    ],
)
def test_with_frozen_addresses_what_makes_values_trains_if_anything_is_learned_so(memory_type, options, change):
    assert of(memory_type, **options).get("frozen-addresses") == change


@pytest.mark.parametrize(
    ("memory_type", "options", "names"),
    [
        ("headwise", {}, ("value_bank",)),
        ("ultramem", {}, ("value_table", "pre_value_table")),
        ("ultramem", {"share": "ring:4"}, ("value_table", "pre_value_table")),
        ("chapters", {"share": "all"}, ("bank",)),
        ("chapters", {"share": "none"}, ("bank",)),
    ],
)
def test_shuffled_are_tables_of_values_also_those_that_layers_share(memory_type, options, names):
    assert of(memory_type, **options)["shuffled-addresses"] == Change(shuffled=names)


def test_layers_say_how_tables_are_shared():
    options = MEMORY_TYPES["ultramem"](share="ring:5")
    with pytest.raises(ValueError, match="share is 'ring:5', but 4 layers have the memory"):
        controls_of(options, SIZES)
    assert list(controls_of(options, SIZES, (0, 1, 2, 3, 4))) == ALL


@pytest.mark.parametrize("memory_type", ["chapters", "headwise", "linear", "product-key", "ultramem"])
def test_addressing_changes_no_tensor_and_no_price(memory_type):
    content, random = (MEMORY_TYPES[memory_type](addressing=addressing) for addressing in ("content", "random"))
    assert content == MEMORY_TYPES[memory_type]()
    assert content.tensors(SIZES) == random.tensors(SIZES)
    assert content.tables(SIZES, (0, 1)) == random.tables(SIZES, (0, 1))
    assert memory_flops(content, SIZES, 2, 8, 0, 2) == memory_flops(random, SIZES, 2, 8, 0, 2)


@dataclass(kw_only=True)
class Foreign(MemoryOptions):
    """A type of another package, which declares no control."""

    sites = ("beside-ffn",)
    width: int = option(3, "rows")

    def __post_init__(self):
        if self.width < 1:
            raise ValueError(f"width is {self.width}; expected one or more.")

    def tensors(self, sizes):
        return {
            "down": DeclaredTensor((self.width, sizes.hidden_size), "key", ONES),
            "up": DeclaredTensor((self.width, sizes.hidden_size), "value", ZEROS),
        }


def test_a_type_of_another_package_has_the_controls_that_follow_from_roles():
    assert controls_of(Foreign(), SIZES) == {
        "frozen-addresses": Change(trainable=("value",)),
        "shuffled-addresses": Change(shuffled=("up",)),
    }
    declaring = register_memory("declaring")(type("Declaring", (Foreign,), {"controls": {"one-row": {"width": 1}}}))
    assert controls_of(declaring(), SIZES)["one-row"] == Change(options={"width": 1})


def test_a_memory_of_values_alone_has_no_addresses_to_freeze():
    values = {"up": DeclaredTensor((3, 32), "value", ZEROS)}
    for roles in (("value",), ("value", "transform")):
        options = type("Values", (Foreign,), {"tensors": lambda self, sizes: values, "value_roles": roles})()
        assert list(controls_of(options, SIZES)) == ["shuffled-addresses"]


def test_a_vector_has_no_rows():
    assert num_value_rows(DeclaredTensor((5,), "value", ZEROS)) == 0
    assert num_value_rows(DeclaredTensor((5, 2), "key", ZEROS)) == 0
    assert num_value_rows(DeclaredTensor((3, 5, 2), "value", ZEROS)) == 5


@pytest.mark.parametrize(
    ("controls", "message"),
    [
        ({"no-rows": {"width": 1}}, "'bad' declares the control 'no-rows'; expected one of one-row, random-slots"),
        (
            {"one-row": {"rows": 1}},
            "'one-row' of memory type 'bad' cannot be built: .* unexpected keyword argument 'rows'",
        ),
        ({"one-row": {}}, "'one-row' of memory type 'bad' sets no option; expected options of this type"),
        (
            {"one-row": {"width": 0}},
            "'one-row' of memory type 'bad' cannot be built: width is 0; expected one or more",
        ),
    ],
    ids=["unknown", "strange-option", "nothing", "refused"],
)
def test_a_control_that_cannot_be_is_refused_where_the_type_is_registered(controls, message):
    with pytest.raises(ValueError, match=message):
        register_memory("bad")(type("Bad", (Foreign,), {"controls": controls}))


def test_every_memory_whose_slots_are_chosen_by_content_can_draw_them():
    choosing = {name for name, options in MEMORY_TYPES.items() if "random-slots" in options.controls}
    assert choosing == {
        name for name, options in MEMORY_TYPES.items() if "addressing" in {field.name for field in fields(options)}
    }
