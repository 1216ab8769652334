"""Memory types and entries of configs: refusals, null controls, and that reading costs nothing."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass, fields, make_dataclass, replace
from typing import Any

import pytest
import torch
from config.reading import SIZES as SIX_LAYERS
from config.reading import read_entry
from tiny import FAMILIES, save_tiny_model

from midus_hf.config.declared_tensors import ONES, ZEROS, DeclaredTensor, ModelSizes
from midus_hf.config.errors import RequestError
from midus_hf.config.options import option
from midus_hf.memories.controls import Change, controls_of, num_value_rows
from midus_hf.memories.midus.options import MidusHmlOptions
from midus_hf.memories.options import InsertedOptions
from midus_hf.memories.registry import MEMORY_TYPES, check_declaration, memory_type, read_memories, register_memory
from midus_hf.models import FAMILIES as HOSTS
from upscalers.checkpoint.base_checkpoint import open_base

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
    return type("Declaring", (Example,), {"tensors": lambda self, sizes: tensors})


def test_registered_type_is_listed_by_its_name(table):
    assert register_memory("example")(Example) is Example
    assert table["example"] is Example
    assert Example().type == "example"
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
    return make_dataclass("Extended", [field], bases=(Example,), kw_only=True)


@pytest.mark.parametrize(("options", "message"), [
    (type("Nowhere", (Example,), {"sites": ()}), r"has sites = \(\); expected one or more of inserted"),
    (type("Elsewhere", (Example,), {"sites": ("outside",)}), r"has sites = \('outside',\); expected one or more of"),
    (declaring(**{"map.weight": DeclaredTensor((4, 4), "buffer", ZEROS)}), r"gives map\.weight the role 'buffer'; expected a"),
    (declaring(codes=DeclaredTensor((4, 4), "value", ZEROS, dtype="int64")), ".* 'value' and the dtype int64; expected the role"),
    (extended("name", str, "x"), "has the option 'name', which says what or where a memory is; choose another name"),
    (declaring(table=DeclaredTensor((4,), "bank", ZEROS)), "gives table the role 'bank'; expected one of key, value"),
])  # fmt: skip
def test_misleading_declaration_is_refused(options, message):
    with pytest.raises(ValueError, match=f"^memory type 'example' {message}"):
        register_memory("example")(options)


def test_own_types_pass_the_check_of_plugins():
    assert len(MEMORY_TYPES) == 13
    for name, options in MEMORY_TYPES.items():
        check_declaration(name, options)
        entry = read_entry({"type": name, "layers": [1, 4]})
        assert read_entry(json.loads(json.dumps(entry.to_dict()))) == entry, name
        assert options.__doc__, name
        assert options.sites, name
        assert all(field.metadata["help"] for field in fields(options)), name


def test_types_and_flops_import_no_torch():
    code = "import sys, midus_hf.memories.flops, midus_hf.memories.registry as m; print(*m.MEMORY_TYPES"
    code += ", *{'torch', 'transformers'} & {*sys.modules})"
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
    assert controls.pop("one-row")
    assert controls.pop("random-slots") == Change(options={"addressing": "random"})
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


ULTRAMEM_ROWS = {"value_table": (1, 6), "pre_value_table": (1, 2)}
ONE_ROW = [
    ("midus-hml", {}, {"value_bank": (1, 8)}), ("midus-pkm", {}, {"value_bank": (1, 32)}), ("moc", {}, {"bank": (1, 32)}),
]  # fmt: skip
ONE_ROW += [("ultramem-v2", {"share": share}, ULTRAMEM_ROWS) for share in ("none", "all", "ring:4")]


@pytest.mark.parametrize(("memory_type", "options", "rows"), ONE_ROW)
def test_one_row_control_has_one_row(memory_type, options, rows):
    options = MEMORY_TYPES[memory_type](**options)
    options = replace(options, **controls_of(options, SIZES)["one-row"].options)
    tables = [shared.tensors for shared in options.tables(SIZES, (0, 1, 2, 3))]
    for tensors in tables or [options.tensors(SIZES)]:
        assert {name: tensor.shape for name, tensor in tensors.items() if tensor.role == "value"} == rows
    assert len(tables) == (memory_type == "moc")
    assert "shuffled-addresses" not in controls_of(options, SIZES)


@pytest.mark.parametrize("memory_type", ["moc", "midus-hml", "midus-linear", "midus-pkm", "ultramem-v2"])
def test_addressing_keeps_tensors_and_flops(memory_type):
    content, random = (MEMORY_TYPES[memory_type](addressing=addressing) for addressing in ("content", "random"))
    assert content == MEMORY_TYPES[memory_type]()
    assert content.tensors(SIZES) == random.tensors(SIZES)
    assert content.tables(SIZES, (0, 1)) == random.tables(SIZES, (0, 1))
    assert content.flops(SIZES, 2, 8, 0, 2) == random.flops(SIZES, 2, 8, 0, 2)


def test_plugin_type_has_controls_by_roles():
    frozen, shuffled = Change(trainable=("value",)), Change(shuffled=("up",))
    assert controls_of(Example(), SIZES) == {"frozen-addresses": frozen, "shuffled-addresses": shuffled}
    controlled = type("Controlled", (Example,), {"controls": {"one-row": {"size": 1}}})
    declared = register_memory("example")(controlled)
    assert controls_of(declared(), SIZES)["one-row"] == Change(options={"size": 1})
    alone = declaring(up=DeclaredTensor((3, 32), "value", ZEROS))  # no address that could be frozen
    for roles in (("value",), ("value", "transform")):
        alone.value_roles = roles
        assert controls_of(alone(), SIZES) == {"shuffled-addresses": shuffled}, roles
    shapes = {((5,), "value"): 0, ((5, 2), "key"): 0, ((3, 5, 2), "value"): 5}
    assert {key: num_value_rows(DeclaredTensor(*key, ZEROS)) for key in shapes} == shapes


def test_entry_is_read():
    entry = read_entry({"type": "midus-hml", "layers": [1, 4], "n": 8, "k": 2})
    assert entry.options == MidusHmlOptions(n=8, k=2)
    assert (entry.options.type, entry.site, entry.layers) == ("midus-hml", "inserted", (1, 4))
    assert read_memories(None, SIX_LAYERS).entries == read_memories([], SIX_LAYERS).entries == ()
    assert len(read_memories([depth(0, 2, name="a"), depth(1, 3, name="b")], SIX_LAYERS).entries) == 2
    assert read_entry({"type": "midus-hml", "layers": [1], "value_bits": None}).options == MidusHmlOptions()


BLOCK = {"type": "midus-hml", "site": "inserted", "layers": [1]}
IN_A_BLOCK = "memory 'ultramem' is attached to layer 1, which was inserted for a memory"
NO_NAME = "expected words joined by hyphens, and no word of a torch"
AFTER = "a layer to add after"
OF_LEVELS = "expected a size for each level of the tree, 0 or more, and not all of them 0, such as [256, 64, 16, 0]."
OTHER = "levels, and 'hier-ffn' by one of branching 3 and 2 levels; expected one tree, by whose nodes a text fetches from both."


def tables(*layers: int, **changes: Any) -> dict[str, Any]:
    return {"type": "ultramem-v2", "layers": list(layers), **changes}


def depth(*layers: int, **changes: Any) -> dict[str, Any]:
    return {"type": "moda", "layers": list(layers), **changes}


def fetched(kind: str = "hier-ffn", **changes: Any) -> dict[str, Any]:
    return {"type": kind, "layers": [0, 2], "sizes": [2, 1], "branching": 3, **changes}


WRONG = [
    (["midus-hml"], r"memory entry is 'midus-hml'; expected a mapping such as \{'type': 'midus-hml', 'layers': \[1\]\}"),
    ([{"layers": [1]}], "memory type is None; expected one of: engram, hier-ffn, "),
    ([{"type": "head-wise", "layers": [1]}], "memory type is 'head-wise'; .* Do not rename a type"),
    ([{"type": ["midus-hml"], "layers": [1]}], r"memory type is \['midus-hml'\]; expected one of"),
    ([{"type": "midus-hml"}], "type 'midus-hml' has no 'layers'; expected the indices of the layers that hold it"),
    ([{"type": "midus-hml", "layers": [1], "sub_keys": 4}], r"'midus-hml' has no option 'sub_keys'\. Expected one of: k, query_norm"),
    ([{"type": "midus-hml", "layers": [1], "value_bits": 8}], "'midus-hml' has value_bits = 8: its values are integers, .* Load the"),
    ([{"type": "moc", "layers": [1], "bank_bits": 4}], "type 'moc' has bank_bits = 4: its values are integers"),
    ([{"type": "midus-hml", "layers": [1], "site": "beside"}], "'midus-hml' has site = 'beside'; expected one of: inserted"),
    ([{"type": "midus-hml", "layers": 1}], "layers is 1; expected a list of layer indices"),
    ([{"type": "midus-hml", "layers": [True]}], r"layers is \[True\]; expected a list of layer indices"),
    ([{"type": "midus-hml", "layers": [4, 1]}], r"layers is \[4, 1\]; expected ascending indices, each once"),
    ([{"type": "midus-hml", "layers": [6]}], "'midus-hml' names layer 6; expected 0 <= layer < 6"),
    ([BLOCK, {"type": "midus-linear", "layers": [1]}], "layer 1 holds two inserted memories; expected at most one"),
    ([{"type": "midus-hml", "layers": [1], "n": 8, "k": 9}], r"k is 9; expected 1 <= k <= n = 8\. Lower k or raise n"),
    ([{"type": "midus-pkm", "layers": [1], "output_projection": True}], "has no option 'output_projection'"),
    ([{"type": "midus-linear", "layers": [1], "slots": 3}], r"k is 4; expected 1 <= k <= slots = 3\. Lower k or raise slots"),
    ([BLOCK, tables(0, 1)], IN_A_BLOCK),
    ([tables(1), BLOCK], IN_A_BLOCK),
    ([BLOCK, tables(0, site="skip", into=[1])], IN_A_BLOCK),
    ([tables(0), tables(0)], "two memories have the name 'ultramem'; expected a separate name for each"),
    ([tables(0, 1, site="skip", into=[2])], rf"'ultramem-v2' reads at layers \[0, 1\] and adds after \[2\]; .* {AFTER}"),
    ([tables(1, 2, site="skip", into=[2, 1])], rf"adds after \[2, 1\]; .* {AFTER}, at or after it"),
    ([tables(0, site="skip")], f"'ultramem-v2' has no 'into'; expected {AFTER}"),
    ([tables(0, site="inside-ffn")], "'ultramem-v2' has site = 'inside-ffn'; expected one of: beside-ffn"),
    ([{**BLOCK, "name": "blocks"}], r"memory entry of type 'midus-hml' has no option 'name'\."),
    *(([tables(0, **{key: 1})], rf"memory entry of type 'ultramem-v2' has no option '{key}'\.") for key in ("into", "span")),
    *(
        ([tables(0, name=name)], re.escape(f"'ultramem-v2' has name = {name!r}; {NO_NAME}"))
        for name in ("a.b", "a--b", "", 5, "keys", "type", "forward")
    ),
    ([depth(0, 1, attention_slots="none", ffn_slots=False)], "expected one of them, for there is nothing to read"),
    ([depth(2)], r"layers is \[2\]; expected two or more, for a layer reads what another in front of it wrote"),
    ([depth(0, 2, name="a"), depth(2, 3, name="b")], "'a' and 'b' both attend in the place of layer 2's own attention"),
    *(([fetched(sizes=sizes)], re.escape(f"sizes is {sizes}; {OF_LEVELS}")) for sizes in ([], [0, 0], [4, -1])),
    *(
        ([fetched(), fetched("hier-kv", **{key: value})], f"memory 'hier-kv' fetches blocks by a tree of branching {tree} {OTHER}")
        for key, value, tree in (("branching", 4, "4 and 2"), ("sizes", [2, 1, 0], "3 and 3"))
    ),
]  # fmt: skip


@pytest.mark.parametrize(("memory", "message"), WRONG, ids=str)
def test_wrong_memory_list_is_refused(memory, message):
    with pytest.raises(ValueError, match=message):
        read_memories(memory, SIX_LAYERS)


@pytest.mark.parametrize("memory", [[{"type": "midus-linear", "layers": [1], "slotz": 9}], [BLOCK] * 2], ids=str)
def test_planning_and_models_give_the_same_refusal(memory, tmp_path):
    folder = save_tiny_model("llama", tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "model_type": "midus_llama", "memory": memory}))
    with pytest.raises(ValueError) as by_planning:
        open_base(folder)
    fields = {key: value for key, value in FAMILIES["llama"].config().to_dict().items() if key != "model_type"}
    with pytest.raises(ValueError) as by_model, torch.device("meta"):
        HOSTS["llama"].config_class(**fields, memory=memory)
    assert str(by_planning.value) == str(by_model.value)


def test_entries_with_earlier_types_are_read():
    earlier = {
        "chapters": "moc", "depth-attention": "moda", "headwise": "midus-hml", "linear": "midus-linear", "ngram": "engram",
        "product-key": "midus-pkm", "ultramem": "ultramem-v2",
    }  # fmt: skip
    for before, now in earlier.items():
        assert memory_type(before) is memory_type(now) is MEMORY_TYPES[now]
    memory = [{"type": "chapters", "layers": [1], "name": "kept"}]
    config = HOSTS["llama"].config_class(num_hidden_layers=2, memory=memory)
    assert config.memory == [{"type": "moc", "layers": [1], "name": "kept"}]
    assert list(config.memories().attached) == ["kept"]
    unnamed = HOSTS["llama"].config_class(num_hidden_layers=2, memory=[{"type": "ngram", "layers": [1]}])
    assert list(unnamed.memories().attached) == ["ngram"]  # as its tensors are called
