"""Requests that make no sense, by method: status 2, one line with value, expectation and remedy, and nothing written."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest

from midus_hf.config.options import describe_options, option
from midus_hf.memories.hierarchical.options import HierFFNOptions
from midus_hf.memories.options import MemoryOptions
from midus_hf.memories.registry import MEMORY_TYPES
from tests.upscalers.checkpoints import SMALL_MEMORY, edit_config, read_tensors, save_base, unverified, write_tensors
from tests.upscalers.real_configs import LLAMA_3_2_1B, write_config
from upscalers.methods.contract import METHODS, get_method, register_method
from upscalers.request import parse_options
from upscalers.runs.upscale import parse_size, upscale

# A base of which there is no more than its config.
ONLY_CONFIG = "llama-3.2-1b"

SET = "--set"
NOT_FINITE = r"layers\.2\.mlp\.gate_proj\.weight holds NaN or infinite .* Repair the base"
STACKED = r"layers has {}; expected single layers of the base, 0 to {}.*Pass, for example, --set"
INFINITE = "came out as NaN or infinite"
# By method: the base, arguments of the command, and a regular expression of the value, the expectation and the remedy.
REFUSED = {
    "solar": [
        ("llama", ["--placement", "top-heavy"], "placement is 'top-heavy', but solar orders .* Pass --num-new-layers"),
        (ONLY_CONFIG, ["--num-new-layers", "7"], "num-new-layers is 7; .*0 < K < 16 .* The nearest: 6 and 8"),
        ("llama", [SET, "identity=auto"], "solar has no option 'identity'. It has none"),
    ],
    "llama-pro": [
        ("llama", [SET, "identity=zero_out_norm"], "llama has no norm after its projections; expected 'zero_out_proj' or"),
        ("memory", ["--placement", "2"], "new layer 2 would .* base layer 1, which is a memory block; .* another placement"),
    ],
    "avg-deus": [
        ("llama", ["--placement", "0,3"], "new layer 0 has no base layer before it; .* placement top-heavy, or indices"),
        ("llama", ["--placement", "llama-pro"], "new layer 5 has no base layer after it"),
        ("gemma2", ["--placement", "1", SET, "neighbours=same_type"],
         r"new layer 1 stands before base layer 1 \(full_attention\), .* or neighbours=adjacent"),
        *(("memory", ["--placement", at], f"new layer {at} would .* base layer 1, which is a memory block") for at in "12"),
    ],
    "lesa": [
        ("two layers", ["--placement", "1"], "the base has 2 layers; lesa needs at least 3"),
        ("memory", ["--placement", "3"], "base layer 1 is a memory block; .* Upscale the base without memory"),
        ("nan", ["--no-verify"], NOT_FINITE),
        *(("llama", [SET, "learning_rate=1e30", verify], INFINITE) for verify in ("--verify", "--no-verify")),
        ("llama", [SET, "device=meta"], r"device is 'meta', .*expected one of: cpu"),
        ("llama", [SET, "norm_weight=1.5"], r"norm_weight is 1\.5; expected 0 <= norm_weight <= 1"),
    ],
    "opt-deus": [
        ("llama", [SET, "preset=[release]"], r"preset is \['release'\]; expected one of: release"),
        ("inf", ["--no-verify"], NOT_FINITE),
        ("llama", [SET, "device=cuda:99"], r"device is 'cuda:99', .*expected one of: cpu"),
    ],
    "stack": [
        ("llama", ["--num-new-layers", "2"], "num-new-layers is 2, but stack uses the option layers; .* Leave it out"),
        ("llama", ["--placement", "1,2"], "placement is '1,2', but stack uses the option layers"),
        ("llama", [], r"layers is missing; expected ranges of the 4 layers .*'layers=\[0-3, 1-3\]'"),
        *(
            ("llama", [SET, f"layers={layers}"], STACKED.format(told, 3))
            for layers, told in (
                ("[0-3, 2-4]", "'2-4'"), ("[0-3, 3-2]", "'3-2'"), ("[0-3, -1]", "'-1'"), ("[]", "''"), ("[[0, 3]]", r"'\[0'"),
                ("[0-3, 1.0]", "'1.0'"), ("[0-3, ²]", "'²'"),
            )
        ),
        ("llama", [SET, "layers=[0-1, 1, 0]"], "layers leaves out 2, 3; expected every layer of the base, 0 to 3"),
        ("llama", [SET, "layers=[2-3, 0-1]"], "layers repeats no layer of the base; expected one at least twice"),
    ],
    "hier-ffn": [
        ("llama", [SET, "branching=100000"], "branching is 100000 and sizes has 4 levels, .* more leaves than memory_ids"),
        ("llama", [SET, "sizes=768,x"], r"sizes is '768,x'; expected a list, .* such as \[4, 2\] or 4,2"),
    ],
    "midus-pkm": [("block", ["--placement", "0"], "new layer 0 needs an attention with an output projection.*Choose midus-hml")],
}  # fmt: skip
# By method: settings of options, on the tiny Llama.
SETTINGS = {
    "moc": [
        ("k=9 chapters=8", "k is 9; expected 1 <= k <= 7, .* Lower k or raise chapters"),
        ("shared_chapters=64", "shared_chapters is 64; expected fewer than chapters = 64"),
        ("shared_chapters=63", "k is 4; expected 1 <= k <= 1, the chapters = 64 less shared_chapters = 63"),
        ("share=every:0", "share is 'every:0'; expected all, none, or every:K"),
        ("chapters=5 k=1", "chapters is 5, which does not divide memory_tokens = 4096; .* Choose a divisor"),
    ],
    "ultramem-v2": [
        ("n=40000 share=ring:4", "n is 40000 and share 'ring:4', which make 6,400,000,000 slots; expected at most"),
        ("rank=17", "rank is 17, more than the 16 features of a key; expected fewer. Lower rank"),
        *((f"share={ring}", f"share is '{ring}'; expected none, all or ring:G") for ring in ("ring", "ring:0")),
        ("share=ring:5", "share is 'ring:5', but 4 layers have the memory; expected a group of at most"),
        ("key_width=wide", "key_width is 'wide'; expected a number, or a fraction .* such as 3/16"),
        ("k=17 n=4", "k is 17; expected at most 16"),
        ("site=behind-layer", "site is 'behind-layer'; expected one of: beside-ffn, skip"),
        ("zero=none", "zero is 'none', with which .* changes what the base computes; expected values or projection"),
    ],
    "moda": [
        ("joining=joint", "joining is 'joint', with which .* change what the base computes; expected added or"),
        ("attention_slots=reused", "attention_slots is 'reused' and joining is 'added', .* none or projected"),
    ],
}  # fmt: skip
CASES = [
    *((method, *case) for method, cases in REFUSED.items() for case in cases),
    *(
        (method, "llama", [word for setting in settings.split() for word in (SET, setting)], message)
        for method, cases in SETTINGS.items()
        for settings, message in cases
    ),
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory, shared_base):
    """A folder by the name that the table calls it."""
    folder = tmp_path_factory.mktemp("bases")
    upscale(base=shared_base("llama"), method="midus-hml", output=folder / "memory", options=SMALL_MEMORY)
    save_base(folder / "two layers", num_hidden_layers=2)
    for value in ("nan", "inf"):
        tensors = read_tensors(save_base(folder / value))
        tensors["model.layers.2.mlp.gate_proj.weight"][0, 0] = float(value)
        write_tensors(folder / value, tensors)
    write_config(folder / ONLY_CONFIG, LLAMA_3_2_1B)
    edit_config(unverified(shared_base("llama"), folder / "block", placement="0"), num_hidden_layers=1)
    (folder / "block" / "model.safetensors").unlink()
    known = {path.name: path for path in folder.iterdir()}
    return lambda name: known.get(name) or shared_base(name)


@pytest.mark.parametrize(
    ("method", "base_name", "arguments", "message"),
    CASES,
    ids=[f"{method} {base} {' '.join(arguments)}" for method, base, arguments, _ in CASES],
)
def test_wrong_request_is_one_line_and_writes_nothing(
    method, base_name, arguments, message, bases, tmp_path, command, refused
):
    usual = ("--base", bases(base_name), "--method", method, *arguments)
    output = ("--dry-run",) if base_name in (ONLY_CONFIG, "block") else ("--output", tmp_path / "out")
    refused(command(*usual, *output), message, [])


def test_list_option_is_read_from_one_line():
    for value in ([768, 256, 16, 0], "768,256,16,0", "768, 256, 16, 0", "768,2.56e2,16,0"):
        options = parse_options(HierFFNOptions, {"sizes": value}, "method hier-ffn")
        assert options.sizes == [768, 256, 16, 0] and all(type(size) is int for size in options.sizes)


def test_options_are_described():
    described = {row["name"]: row for row in describe_options(Presets)}
    assert described["steps"] == {"name": "steps", "type": "a whole number", "default": 10, "help": "how many"}
    assert (described["kind"]["type"], described["name"]["type"]) == ("a | b", "a string | null")
    assert described["preset"]["help"] == "several options at once (fast: steps=1, rate=0.5)"
    assert (described["scale"]["type"], described["scale"]["default"]) == ("a mapping", {"down": 0.5})


def test_every_memory_type_has_a_method():
    get_method("midus-hml")
    options = [method.options_class for method in METHODS.values()]
    assert {each.type for each in options if issubclass(each, MemoryOptions)} == set(MEMORY_TYPES)


SIZES = {"5GB": 5 * 10**9, "500MB": 5 * 10**8, "1.5 kb": 1500, "2GiB": 2**31, "7": 7, 1234: 1234, "1B": 1}


def test_shard_size_is_read_with_its_unit():
    assert {text: parse_size(text) for text in SIZES} == SIZES
    for text in ("", "0", "-5GB", "5XB", "GB", "1e9", None, "5GB/s"):
        with pytest.raises(ValueError, match=r"max-shard-size is .*; expected a positive size such as 5GB"):
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


def test_preset_sets_options_unless_given():
    for arguments in ({"preset": "fast", "rate": 0.9}, {"rate": 0.9, "preset": "fast"}):
        chosen = parse_options(Presets, arguments, "method x")
        assert (chosen.steps, chosen.rate) == (1, 0.9)
    for arguments in ({}, {"preset": None}):
        chosen = parse_options(Presets, arguments, "method x")
        assert (chosen.steps, chosen.scale) == (10, {"down": 0.5})
        chosen.scale["down"] = 1.0  # a default that options do not share


@pytest.mark.parametrize(
    ("name", "attributes", "message"),
    [
        ("midus-hml", {}, "method 'midus-hml' is already registered; choose another name"),
        ("x", {"identity": "auto"}, "method x has identity = 'auto'; expected True or False"),
    ],
)
def test_wrong_method_is_not_registered(name, attributes, message):
    get_method("midus-hml")
    before = dict(METHODS)
    with pytest.raises(ValueError, match=message):
        register_method(name)(type("X", (), attributes))
    assert before == METHODS
