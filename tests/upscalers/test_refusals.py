"""Requests that make no sense, by method: status 2, one line with value, expectation and remedy, and nothing written."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest

from midus_hf.config.options import describe_options, option
from midus_hf.memories.hierarchical.options import HierFFNOptions
from midus_hf.memories.options import MemoryOptions
from midus_hf.memories.registry import MEMORY_TYPES
from tests.upscalers.checkpoints import SMALL_MEMORY, read_tensors, save_base, write_tensors
from tests.upscalers.real_configs import LLAMA_3_2_1B, write_config
from upscalers.methods.contract import METHODS, get_method, register_method
from upscalers.request import parse_options
from upscalers.runs.upscale import parse_size, upscale

# A base of which there is no more than its config.
ONLY_CONFIG = "llama-3.2-1b"

NO_NORMS = (
    "identity is 'zero_out_norm', but llama has no norm after its projections; expected 'zero_out_proj' or 'auto'."
)
ORDERED = "placement is {}, but solar orders the layers itself; expected none. Pass --num-new-layers."
COUNT = (
    "num-new-layers is {}; solar leaves the same number of layers out of each of its two stacks, so expected K with "
    "0 < K < {}"
)
ONE_SIDE = (
    "new layer {} has no base layer {} it; expected one on each side, since both are fused. Choose placement top-heavy, "
    "or indices inside the model."
)
MEMORY = (
    "new layer {} would be made from base layer {}, which is a memory block; expected a layer with a feed-forward "
    "network. Choose another placement."
)
OF_ITS_TYPE = (
    r"new layer 1 stands before base layer 1 \(full_attention\), and no layer before it attends like it; expected one, "
    "since neighbours is 'same_type'. Choose another placement, or neighbours=adjacent."
)

SOLAR = [
    ("llama", ["--placement", "top-heavy"], ORDERED.format("'top-heavy'")),
    ("two layers", [], "the base has 2 layers; solar needs at least 3 to leave some out of each stack."),
    *(("llama", ["--num-new-layers", k], COUNT.format(k, "4 and 4 - K even. The nearest: 2.")) for k in ("3", "0")),
    (ONLY_CONFIG, ["--num-new-layers", "7"], COUNT.format(7, "16 and 16 - K even. The nearest: 6 and 8.")),
    ("llama", ["--set", "identity=auto"], "method solar has no option 'identity'. It has none."),
]  # fmt: skip
LLAMA_PRO = [
    ("llama", ["--set", "identity=zero_out_norm"], NO_NORMS),
    ("llama", ["--num-new-layers", "3"], "num-new-layers is 3; placement llama-pro needs a divisor of the 4"),
    ("memory", ["--placement", "2"], MEMORY.format(2, 1)),
]  # fmt: skip
AVG_DEUS = [
    ("llama", ["--placement", "0,3"], ONE_SIDE.format(0, "before")),
    ("llama", ["--placement", "llama-pro"], ONE_SIDE.format(5, "after")),
    ("gemma2", ["--placement", "1", "--set", "neighbours=same_type"], OF_ITS_TYPE),
    ("memory", ["--placement", "1"], MEMORY.format(1, 1)),
    ("memory", ["--placement", "2"], MEMORY.format(2, 1)),
    ("two layers", ["--num-new-layers", "2"], "num-new-layers is 2; placement top-heavy fits at most 1, one in each gap"),
]  # fmt: skip
NOT_FINITE = (
    r"model\.layers\.2\.mlp\.gate_proj\.weight holds NaN or infinite values, and new weights are computed from it; "
    r"expected finite weights\. Repair the base\."
)
TOO_FEW = "the base has {}; lesa needs at least 3, to learn a layer from the two around it."
LEARNING = [
    ("one layer", ["--placement", "1"], TOO_FEW.format("1 layers")),
    ("two layers", ["--placement", "1"], TOO_FEW.format("2 layers")),
    ("memory", ["--placement", "3"], "base layer 1 is a memory block; lesa learns from all layers, and expected each to have a "
     "feed-forward network. Upscale the base without memory first."),
    ("nan", ["--no-verify"], NOT_FINITE),
]  # fmt: skip
FUSING = [
    ("llama", ["--set", "preset=[release]"], r"preset is \['release'\]; expected one of: release."),
    ("inf", ["--no-verify"], NOT_FINITE),
    ("nan", ["--no-verify", "--set", "solver=hungarian"], NOT_FINITE),
]
EXAMPLE = r" Pass, for example, --set 'layers=\[0-3, 1-3\]'\."
STACK = [
    ("llama", ["--num-new-layers", "2"], "num-new-layers is 2, but stack uses the option layers; expected none. Leave it out."),
    ("llama", ["--placement", "1,2"], "placement is '1,2', but stack uses the option layers; expected none. Leave it out."),
    ("llama", [], f"layers is missing; expected ranges of the 4 layers of the base.{EXAMPLE}"),
    *(
        ("llama", ["--set", f"layers={layers}"], f"layers has {told}; expected single layers of the base, 0 to 3, and ascending "
         f"ranges, ends included.{EXAMPLE}")
        for layers, told in (
            ("[0-3, 2-4]", "'2-4'"), ("0-3,4", "'4'"), ("[0-3, 3-2]", "'3-2'"), ("[0-3, -1]", "'-1'"), ("[]", "''"), ("0-3,", "''"),
            ("[[0, 3], [1, 2]]", r"'\[0'"), ("true", "'True'"), ("[0-3, 1.0]", "'1.0'"), ("all", "'all'"), ("[0-3, ²]", "'²'"),
        )
    ),
    ("llama", ["--set", "layers=[0-1, 1, 0]"], "layers leaves out 2, 3; expected every layer of the base, 0 to 3, or strip could not "
     f"restore it.{EXAMPLE}"),
    ("llama", ["--set", "layers=[2-3, 0-1]"], f"layers repeats no layer of the base; expected one at least twice.{EXAMPLE}"),
    ("one layer", ["--set", "layers=1"], r"'1'; expected single layers of the base, 0 to 0, .*'layers=\[0-0, 0-0\]'"),
]  # fmt: skip
# By method: the base, arguments of the command, and a regular expression of what is said.
DENSE = {
    "solar": SOLAR,
    "stack": STACK,
    "llama-pro": LLAMA_PRO,
    "avg-deus": AVG_DEUS,
    "lesa": LEARNING,
    "opt-deus": FUSING,
}

NO_DEVICE = r"device is '{}', which cannot be used here .*expected one of: cpu(, cuda)?\."
OPT_DEUS = [
    ("device=cuda:99", NO_DEVICE.format("cuda:99")),
]  # fmt: skip
LESA = [
    ("device=meta", NO_DEVICE.format("meta")),
    ("norm_weight=1.5", r"norm_weight is 1\.5; expected 0 <= norm_weight <= 1\."),
]  # fmt: skip
MOC = [
    ("k=9 chapters=8", r"k is 9; expected 1 <= k <= 7, the chapters = 8 less shared_chapters = 1\. Lower k or raise chapters\."),
    ("shared_chapters=64", r"shared_chapters is 64; expected fewer than chapters = 64, so that some are left for the router\."),
    ("shared_chapters=63", r"k is 4; expected 1 <= k <= 1, the chapters = 64 less shared_chapters = 63\."),
    ("share=every:0", "share is 'every:0'; expected all, none, or every:K"),
    ("chapters=5 k=1", r"chapters is 5, which does not divide memory_tokens = 4096; expected .* Choose a divisor\."),
    ("share=some", r"share is 'some'; expected all, none, or every:K such as every:2\."),
]  # fmt: skip
ULTRAMEM = [
    ("n=40000 share=ring:4", "n is 40000 and share 'ring:4', which make 6,400,000,000 slots; expected at most"),
    ("rank=17", "rank is 17, more than the 16 features of a key; expected fewer. Lower rank."),
    *(
        (f"share={share}", f"share is '{share}'; expected none, all or ring:G, such as ring:4.")
        for share in ("ring", "ring:0", "Ring:2")
    ),
    ("share=ring:5", "share is 'ring:5', but 4 layers have the memory; expected a group of at most that many tables."),
    ("value_width=0", "value_width is 0; expected 1 or more."),
    ("pre_value_width=-1", "pre_value_width is -1; expected 0 or more."),
    ("key_width=wide", "key_width is 'wide'; expected a number, or a fraction of the hidden size such as 3/16."),
    ("k=17 n=4", "k is 17; expected at most 16, the pairs of 4 rows and 4 columns that the first stage keeps."),
    ("site=behind-layer", "site is 'behind-layer'; expected one of: beside-ffn, skip."),
    ("zero=none", "zero is 'none', with which the new memory changes what the base computes; expected values or projection."),
]  # fmt: skip
MODA = [
    ("joining=joint", "joining is 'joint', with which the new slots change what the base computes; expected added or"),
    (
        "attention_slots=reused",
        "attention_slots is 'reused' and joining is 'added', which adds values of earlier layers that are not zero to what the base "
        "computes; expected attention_slots none or projected, or joining interpolated.",
    ),
]  # fmt: skip
HIER_FFN = [
    ("branching=100000", "branching is 100000 and sizes has 4 levels, which make more leaves than memory_ids, int64"),
    ("sizes=768,x", r"sizes is '768,x'; expected a list, each item of it a whole number, such as \[4, 2\] or 4,2\."),
]
# By method: settings of options, and a regular expression of what is said, or its very words.
SETTINGS = {
    "lesa": LESA,
    "opt-deus": OPT_DEUS,
    "moc": MOC,
    "moda": MODA,
    "ultramem-v2": ULTRAMEM,
    "hier-ffn": HIER_FFN,
}

ATTACHED = "attaches memory to existing layers"
INFINITE = "came out as NaN or infinite, although its sources are finite"
CASES = [
    *((method, *case) for method, cases in DENSE.items() for case in cases),
    *(
        (method, "llama", [word for setting in settings.split() for word in ("--set", setting)], message)
        for method, cases in SETTINGS.items()
        for settings, message in cases
    ),
    *(("hier-ffn", "llama", words.split(), ATTACHED) for words in ("--num-new-layers 2", "--placement top-heavy")),
    *(("lesa", "llama", ["--set", "learning_rate=1e30", verify], INFINITE) for verify in ("--verify", "--no-verify")),
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory, shared_base):
    """A folder by the name that the table calls it."""
    folder = tmp_path_factory.mktemp("bases")
    upscale(base=shared_base("llama"), method="midus-hml", output=folder / "memory", options=SMALL_MEMORY)
    for number, name in enumerate(("one layer", "two layers"), 1):
        save_base(folder / name, num_hidden_layers=number)
    for value in ("nan", "inf"):
        tensors = read_tensors(save_base(folder / value))
        tensors["model.layers.2.mlp.gate_proj.weight"][0, 0] = float(value)
        write_tensors(folder / value, tensors)
    write_config(folder / ONLY_CONFIG, LLAMA_3_2_1B)
    known = {path.name: path for path in folder.iterdir()}
    return lambda name: known.get(name) or shared_base(name)


@pytest.mark.parametrize(
    ("method", "base_name", "arguments", "message"),
    CASES,
    ids=[f"{method} {base} {' '.join(arguments)}" for method, base, arguments, _ in CASES],
)
def test_a_request_that_makes_no_sense_is_refused(
    method, base_name, arguments, message, bases, tmp_path, command, refused
):
    usual = ("--base", bases(base_name), "--method", method, *arguments)
    output = ("--dry-run",) if base_name == ONLY_CONFIG else ("--output", tmp_path / "out")
    refused(command(*usual, *output), message, [])


def test_numbers_of_a_list_may_stand_in_one_line():
    for value in ([768, 256, 16, 0], "768,256,16,0", "768, 256, 16, 0", "768,2.56e2,16,0"):
        options = parse_options(HierFFNOptions, {"sizes": value}, "method hier-ffn")
        assert options.sizes == [768, 256, 16, 0] and all(type(size) is int for size in options.sizes)


def test_options_are_described_for_people():
    described = {row["name"]: row for row in describe_options(Presets)}
    assert described["steps"] == {"name": "steps", "type": "a whole number", "default": 10, "help": "how many"}
    assert (described["kind"]["type"], described["name"]["type"]) == ("a | b", "a string | null")
    assert described["preset"]["help"] == "several options at once (fast: steps=1, rate=0.5)"
    assert (described["scale"]["type"], described["scale"]["default"]) == ("a mapping", {"down": 0.5})


def test_each_memory_type_is_given_by_a_method():
    get_method("midus-hml")
    arguments = [
        method.options_class for method in METHODS.values() if issubclass(method.options_class, MemoryOptions)
    ]
    assert {options.type for options in arguments} == set(MEMORY_TYPES)


SIZES = {"5GB": 5 * 10**9, "500MB": 5 * 10**8, "1.5 kb": 1500, "2GiB": 2**31, "7": 7, 1234: 1234, "1B": 1}


def test_sizes_are_read_as_people_write_them():
    assert {text: parse_size(text) for text in SIZES} == SIZES
    for text in ("", "0", "-5GB", "5XB", "GB", "five", "1e9", None, "5GB/s"):
        with pytest.raises(ValueError, match=r"max-shard-size is .*; expected a positive size such as 5GB or 500MB"):
            parse_size(text)


@dataclass
class Presets:
    """Options with a preset."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {"fast": {"steps": 1, "rate": 0.5}}

    steps: int = option(10, "how many")
    rate: float = option(0.1, "rate")
    scale: Any = option({"down": 0.5}, "scale", type="a mapping")
    kind: Literal["a", "b"] = option("a", "which")
    name: str | None = option(None, "called")


def test_a_preset_sets_several_options_and_given_ones_win():
    for arguments in ({"preset": "fast", "rate": 0.9}, {"rate": 0.9, "preset": "fast"}):
        chosen = parse_options(Presets, arguments, "method x")
        assert (chosen.steps, chosen.rate) == (1, 0.9)
    assert parse_options(Presets, {}, "method x").steps == 10
    assert parse_options(Presets, {"preset": None}, "method x").steps == 10
    parse_options(Presets, {}, "method x").scale["down"] = 1.0  # a default that options do not share
    assert parse_options(Presets, {}, "method x").scale == {"down": 0.5}


@pytest.mark.parametrize(
    ("name", "attributes", "message"),
    [
        ("midus-hml", {}, "method 'midus-hml' is already registered; choose another name"),
        ("x", {}, "method x has identity = None; expected True or False: whether, with the"),
        ("x", {"identity": "auto"}, "method x has identity = 'auto'; expected True or False: whether, with the"),
    ],
)
def test_methods_that_are_not_registered(name, attributes, message):
    get_method("midus-hml")
    before = dict(METHODS)
    with pytest.raises(ValueError, match=message):
        register_method(name)(type("X", (), attributes))
    assert before == METHODS
