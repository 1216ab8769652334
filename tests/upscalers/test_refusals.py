"""Wrong requests, by method: status 2, one line with value and remedy, nothing written."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from refusals import Mutation, Refusal, Spoilt, each, remove, replace
from tiny import NATIVE_FAMILIES

from midus_hf.config.options import describe_options, option
from midus_hf.memories.hierarchical.options import HierFFNOptions
from midus_hf.memories.options import MemoryOptions
from midus_hf.memories.registry import MEMORY_TYPES
from scripts.anatomy.tiny import tiny_model
from tests.upscalers.checkpoints import SMALL_MEMORY, edit_config, save_base, unverified, write_tensors
from tests.upscalers.contents import config_of, read_tensors, tensor_files
from tests.upscalers.real_configs import LLAMA_3_2_1B, write_config
from upscalers.methods.contract import METHODS, get_method, register_method
from upscalers.request import parse_options, parse_size
from upscalers.runs.upscale import upscale

# Bases with only a config: a published one, and the tiny Llama with changes.
ONLY_CONFIG = "llama-3.2-1b"
CONFIGS = {
    "width 20": {"hidden_size": 20, "head_dim": 8}, "width 34": {"hidden_size": 34, "head_dim": 8}, "heads of 16": {"head_dim": 16},
}  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory, shared_base):
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
    for name, changes in CONFIGS.items():
        write_config(folder / name, {**config_of(shared_base("llama")), **changes})
    known = {path.name: path for path in folder.iterdir()}
    return lambda name: known.get(name) or shared_base(name)


@dataclass(frozen=True)
class Refused(Refusal):
    """`asked`: words of the command."""

    base: str = "llama"

    def __str__(self) -> str:
        return f"{self.base} {super().__str__()}"


def by_method(table: dict[str, list[Any]]) -> pytest.MarkDecorator:
    """Make a test of each row, its parameters `method` and `row`."""
    rows = [(method, row) for method, of_method in table.items() for row in of_method]
    return pytest.mark.parametrize(("method", "row"), rows, ids=str)


SET = "--set"
NOT_FINITE = r"layers\.2\.mlp\.gate_proj\.weight holds NaN or infinite .* Repair the base"
SINGLE = "expected single layers of the base, 0 to 3.*Pass, for example, --set"
INFINITE = "came out as NaN or infinite"
REFUSED: dict[str, list[Refused]] = {
    "midus-hml": [
        Refused(["--method", "midus-hmm"], r"'midus-hmm' is unknown. Did you mean midus-hml\? Expected one of: .*llama-pro"),
        Refused(["--method", "lora"], "'lora' is unknown. Adapters are trained on the base itself: 'midus train"),
        Refused(["--set", "m=8"], r"method midus-hml has no option 'm'\. Expected one of: k, query_norm, .*, n, output_projection"),
        Refused(["--set", "query-norm=true", "--set", "query_norm=true"], "--set query_norm is given twice; expected each"),
        Refused(["--set", "layers=[1]"], r"It is an option of the command: --placement\."),
        Refused(["--set", "seed=1"], r"It is an option of the command: --seed\."),
        Refused(["--seed", "-5"], "seed is -5; expected an integer from 0 to 922"),
        Refused(["--seed", "9223372036854775808"], "seed is 9223372036854775808; expected an integer from 0 to 922"),
        Refused(["--placement", "0,6"], r"placement is 0,6; .* from 0 to 5, counted in the upscaled model of 4 \+ 2 layers"),
        Refused(["--num-new-layers", "3"], "is 3; placement distributed needs a divisor of the 4 base layers: 1, 2, 4. Choose"),
        Refused(["--num-new-layers", "two"], r"Invalid value for '--num-new-layers': .* See 'upscale --help'"),
        Refused(["--dtype", "fp16"], "dtype is 'fp16'; expected one of: auto, float32"),
        Refused(["--max-shard-size", "big"], "max-shard-size is 'big'; expected a positive size such as 5GB"),
        Refused(["--base", "/no/such/folder"], "'/no/such/folder' is neither a folder nor a hub id; expected one"),
        Refused(["--base", "no-such-folder"], "is no local folder, and the Hub cannot be reached .or HF_HUB_OFFLINE"),
        Refused(["--base", "a--b"], "'a--b' is no local folder and no hub id"),
        Refused(["--base", __file__], r"test_refusals\.py' is a file; expected a folder, .* Give the folder"),
        Refused(["--private"], "private is given without push-to-hub; expected both. Pass --push-to-hub REPO"),
        Refused(["--push-to-hub", "me/my/model"], "push-to-hub is 'me/my/model'; expected a repository such as me/model"),
        Refused(["--set", "output_projection=true"], "hidden_size / num_attention_heads is 5; expected an even number", "width 20"),
        Refused([], r"hidden size \(34\) is not a multiple of .* attention heads \(4\)", "width 34"),
        Refused(["--set", "inner_residual=true"], "of width 32 to .* output of width 64; expected equal", "heads of 16")],
    "solar": [
        Refused(["--placement", "top-heavy"], "placement is 'top-heavy', but solar orders .* Pass --num-new-layers"),
        Refused(["--num-new-layers", "7"], "num-new-layers is 7; .*0 < K < 16 .* The nearest: 6 and 8", ONLY_CONFIG),
        Refused([SET, "identity=auto"], "solar has no option 'identity'. It has none")],
    "llama-pro": [
        Refused([SET, "identity=zero_out_norm"], "llama has no norm after its projections; expected 'zero_out_proj' or"),
        Refused(["--placement", "2"], "new layer 2 would .* base layer 1, which is a memory block; .* another placement", "memory")],
    "avg-deus": [
        Refused(["--placement", "0,3"], "new layer 0 has no base layer before it; .* placement top-heavy, or indices"),
        Refused(["--placement", "llama-pro"], "new layer 5 has no base layer after it"),
        Refused(["--placement", "1", SET, "neighbours=same_type"],
         r"new layer 1 stands before base layer 1 \(full_attention\), .* or neighbours=adjacent", "gemma2"),
        Refused(["--placement", "1"], "new layer 1 would .* base layer 1, which is a memory block", "memory"),
        Refused(["--placement", "2"], "new layer 2 would .* base layer 1, which is a memory block", "memory")],
    "lesa": [
        Refused(["--placement", "1"], "the base has 2 layers; lesa needs at least 3", "two layers"),
        Refused(["--placement", "3"], "base layer 1 is a memory block; .* Upscale the base without memory", "memory"),
        Refused(["--no-verify"], NOT_FINITE, "nan"),
        Refused([SET, "learning_rate=1e30", "--verify"], INFINITE),
        Refused([SET, "learning_rate=1e30", "--no-verify"], INFINITE),
        Refused([SET, "device=meta"], r"device is 'meta', .*expected one of: cpu"),
        Refused([SET, "norm_weight=1.5"], r"norm_weight is 1\.5; expected 0 <= norm_weight <= 1")],
    "opt-deus": [
        Refused([SET, "preset=[release]"], r"preset is \['release'\]; expected one of: release"),
        Refused(["--no-verify"], NOT_FINITE, "inf"),
        Refused([SET, "device=cuda:99"], r"device is 'cuda:99', .*expected one of: cpu")],
    "stack": [
        Refused(["--num-new-layers", "2"], "num-new-layers is 2, but stack uses the option layers; .* Leave it out"),
        Refused(["--placement", "1,2"], "placement is '1,2', but stack uses the option layers"),
        Refused([], r"layers is missing; expected ranges of the 4 layers .*'layers=\[0-3, 1-3\]'"),
        Refused([SET, "layers=[0-3, 2-4]"], "layers has '2-4'; " + SINGLE),
        Refused([SET, "layers=[0-3, 3-2]"], "layers has '3-2'; " + SINGLE),
        Refused([SET, "layers=[0-3, -1]"], "layers has '-1'; " + SINGLE),
        Refused([SET, "layers=[]"], "layers has ''; " + SINGLE),
        Refused([SET, "layers=[[0, 3]]"], r"layers has '\[0'; " + SINGLE),
        Refused([SET, "layers=[0-3, 1.0]"], "layers has '1.0'; " + SINGLE),
        Refused([SET, "layers=[0-3, ²]"], "layers has '²'; " + SINGLE),
        Refused([SET, "layers=[0-1, 1, 0]"], "layers leaves out 2, 3; expected every layer of the base, 0 to 3"),
        Refused([SET, "layers=[2-3, 0-1]"], "layers repeats no layer of the base; expected one at least twice")],
    "hier-ffn": [
        Refused([SET, "branching=100000"], "branching is 100000 and sizes has 4 levels, .* more leaves than memory_ids"),
        Refused([SET, "sizes=768,x"], r"sizes is '768,x'; expected a list, .* such as \[4, 2\] or 4,2")],
    "midus-pkm": [
        Refused(["--placement", "0"], "new layer 0 needs an attention with an output projection.*Choose midus-hml", "block")],
}  # fmt: skip


@by_method(REFUSED)
def test_wrong_request_is_one_line_and_writes_nothing(method, row, bases, tmp_path, command, refused):
    is_config = row.base in (ONLY_CONFIG, "block", *CONFIGS)
    place = ("--dry-run",) if is_config else ("--output", tmp_path / "out")
    refused(command("--base", bases(row.base), "--method", method, *row.asked, *place), row.said, [])


SETTINGS: dict[str, list[Refusal]] = {
    "moc": [
        Refusal("k=9 chapters=8", "k is 9; expected 1 <= k <= 7, .* Lower k or raise chapters"),
        Refusal("shared_chapters=64", "shared_chapters is 64; expected fewer than chapters = 64"),
        Refusal("shared_chapters=63", "k is 4; expected 1 <= k <= 1, the chapters = 64 less shared_chapters = 63"),
        Refusal("share=every:0", "share is 'every:0'; expected all, none, or every:K"),
        Refusal("chapters=5 k=1", "chapters is 5, which does not divide memory_tokens = 4096; .* Choose a divisor")],
    "ultramem-v2": [
        Refusal("n=40000 share=ring:4", "n is 40000 and share 'ring:4', which make 6,400,000,000 slots; expected at most"),
        Refusal("rank=17", "rank is 17, more than the 16 features of a key; expected fewer. Lower rank"),
        Refusal("share=ring", "share is 'ring'; expected none, all or ring:G"),
        Refusal("share=ring:0", "share is 'ring:0'; expected none, all or ring:G"),
        Refusal("share=ring:5", "share is 'ring:5', but 4 layers have the memory; expected a group of at most"),
        Refusal("key_width=wide", "key_width is 'wide'; expected a number, or a fraction .* such as 3/16"),
        Refusal("k=17 n=4", "k is 17; expected at most 16"),
        Refusal("site=behind-layer", "site is 'behind-layer'; expected one of: beside-ffn, skip"),
        Refusal("zero=none", "zero is 'none', with which .* changes what the base computes; expected values or projection")],
    "moda": [
        Refusal("joining=joint", "joining is 'joint', with which .* change what the base computes; expected added or"),
        Refusal("attention_slots=reused", "attention_slots is 'reused' and joining is 'added', .* none or projected")],
}  # fmt: skip


@by_method(SETTINGS)
def test_wrong_option_is_one_line_and_writes_nothing(method, row, base, tmp_path, command, refused):
    words = [word for setting in row.asked.split() for word in (SET, setting)]
    refused(command("--base", base, "--method", method, *words, "--output", tmp_path / "out"), row.said, [])


def test_linear_memory_takes_any_width(bases, command):
    assert command("--base", bases("width 20"), "--method", "midus-linear", "--dry-run").status == 0


INDEX = "model.safetensors.index.json"


def set_tensors(change: Callable[[dict], dict]) -> Mutation:
    return lambda base: write_tensors(base, {**read_tensors(base), **change(read_tensors(base))})


def rename(name: str, other: str) -> Mutation:
    return lambda base: (base / name).rename(base / other)


def config(**changes: Any) -> Mutation:
    return lambda base: edit_config(base, **changes)


def another(family: str, **changes: Any) -> Mutation:
    def mutate(base: Path) -> None:
        shutil.rmtree(base)
        save_base(base, family) if family in NATIVE_FAMILIES else tiny_model(family).save_pretrained(base)
        edit_config(base, **changes)

    return mutate


def sharded(then: Mutation) -> Mutation:
    def mutate(base: Path) -> None:
        shutil.rmtree(base)
        save_base(base, max_shard_size="30KB")
        then(base)

    return mutate


def edit_index(change: Callable[[dict], Any]) -> Mutation:
    def edit(base: Path) -> None:
        index = json.loads((base / INDEX).read_text())
        change(index["weight_map"])
        (base / INDEX).write_text(json.dumps(index))

    return sharded(edit)


BASES = [
    Spoilt("no config", "has no config.json; expected a Hugging Face checkpoint folder or a hub id", remove("config.json")),
    Spoilt("a GGUF file in a folder", r"has no config.json, but a GGUF file; .*gguf_file='model\.gguf', .*save_pretrained",
           rename("config.json", "model.gguf")),
    Spoilt("an adapter", "has no config.json, but a PEFT adapter .adapter_config.json.; .* Merge the adapter .*merge_and_unload",
           rename("config.json", "adapter_config.json")),
    Spoilt("an adapter in a base", "holds a PEFT adapter .adapter_config.json.*Merge the adapter",
           replace("adapter_config.json", "{}")),
    Spoilt("config not JSON", "config.json is not JSON, or cannot be read .*Repair or download it again",
           replace("config.json", "{")),
    Spoilt("config no object", "config.json holds a list; expected a JSON object", replace("config.json", "[1]")),
    Spoilt("config a folder", "has no config.json; expected",
           lambda base: ((base / "config.json").unlink(), (base / "config.json").mkdir())),
    Spoilt("config nested without end", "config.json is not JSON", replace("config.json", '{"a":' * 100_000)),
    Spoilt("unknown family", "'lama' is not among the .* expected one of these .* Do not rename the type", config(model_type="lama")),
    Spoilt("no layers", "num_hidden_layers = 0; expected an integer from 1 to 10000", config(num_hidden_layers=0)),
    Spoilt("too many layers",
           r"lacks 18 tensors .*, model\.layers\.4\..* and 14 more\. .* correct config.json, which has num_hidden_layers = 6\.",
           config(num_hidden_layers=6)),
    Spoilt("a gap in the layers", r"the base lacks 9 tensors that its config requires, model\.layers\.1\..* Download or save it",
           lambda base: (
               edit_config(base, num_hidden_layers=3),
               write_tensors(base, {n: t for n, t in read_tensors(base).items() if ".layers.1." not in n}))),
    Spoilt("too few types of layers", r"config.json lists 3 layer_types; expected \d, .* Repair the base",
           another("gemma3", layer_types=["full_attention"] * 3)),
    Spoilt("an unknown type of layer",
           "lists 'linear_attention' in layer_types; expected full_attention or sliding_attention in a qwen3 model",
           another("qwen3", layer_types=["full_attention", "linear_attention", "full_attention", "full_attention"])),
    Spoilt("a layer of another type that the model lacks", "lists 7 in mlp_only_layers; expected layers from 0 to 3",
           another("qwen3_moe", mlp_only_layers=[0, 7])),
    Spoilt("too few layers", r"the base holds model\.layers\.3\..*, but config.json has num_hidden_layers",
           config(num_hidden_layers=3)),
    Spoilt("wrong size", r"is \[48, 32\] in the base; expected \[49, 32\] by its config", config(intermediate_size=49)),
    Spoilt("config transformers refuses", r"transformers cannot build the model .*rms_norm_eps.* Repair",
           config(rms_norm_eps="small")),
    Spoilt("scale not a number", "transformers cannot run .*TypeError: .*complex.*Repair",
           another("gemma3", query_pre_attn_scalar=-16)),
    Spoilt("no weights", "holds no weights; expected model.safetensors or an index of shards", remove("model.safetensors")),
    Spoilt("pickled weights",
           r"holds pytorch_model\.bin; expected model\.safetensors .*AutoModelForCausalLM\.from_pretrained\('.*'\)\.save_pretrained",
           rename("model.safetensors", "pytorch_model.bin")),
    Spoilt("cut weights", "is not a valid safetensors file: .*it may be truncated. Download or save it",
           lambda base: os.truncate(base / "model.safetensors", (base / "model.safetensors").stat().st_size - 1)),
    Spoilt("weights in I64", "model.norm.weight .*is stored as I64; expected float32, .*Start from the unquantised",
           set_tensors(lambda tensors: {"model.norm.weight": tensors["model.norm.weight"].to(torch.int64)})),
    Spoilt("weights in F8_E5M2", "model.norm.weight .*is stored as F8_E5M2; expected float32, .*Start from the unquantised",
           set_tensors(lambda tensors: {"model.norm.weight": tensors["model.norm.weight"].to(torch.float8_e5m2)})),
    Spoilt("a reward model", "has score.weight, the head of a classifier, .*; expected a language model. Upscale the language model",
           set_tensors(lambda tensors: {"score.weight": torch.ones(1, 32)})),
    Spoilt("index without map", "index.json is not a shard index .KeyError", sharded(replace(INDEX, "{}"))),
    Spoilt("index of noise", "index.json is not a shard index .UnicodeDecodeError: .{0,150} Download or save it again",
           sharded(lambda base: (base / INDEX).write_bytes(b"\x9c" * 3000))),
    Spoilt("missing shard",
           "index.json places .* in model-00002-of-.*, which is missing or does not hold it. Download or save the base again",
           sharded(lambda base: tensor_files(base)[1].unlink())),
    Spoilt("index names an absent tensor", "index.json places model.extra in model-.*, which is missing or does not hold it.",
           edit_index(lambda names: names.update({"model.extra": next(iter(names.values()))}))),
    Spoilt("index points outside",
           "index.json names the shard '../other.safetensors'; expected a .safetensors file in the same folder",
           edit_index(lambda names: names.update({"lm_head.weight": "../other.safetensors"}))),
    Spoilt("D no multiple of H", "hidden_size is 34; expected a multiple of the 4 attention heads",
           lambda base: (shutil.rmtree(base), save_base(base, "qwen3", hidden_size=34))),
]  # fmt: skip


@each(BASES)
def test_unusable_base_is_refused(row, command, tmp_path, refused):
    base = save_base(tmp_path / "base")
    row.spoil(base)
    arguments = ("--base", base, "--method", "midus-hml", "--output", tmp_path / "out", "--set", "n=8", "--set", "k=2")
    refused(command(*arguments), row.said, ["base"])


def test_missing_arguments_are_asked_for(command, base, tmp_path, refused):
    options = {"--base": base, "--method": "midus-hml", "--output": tmp_path / "out"}
    for missing in options:
        arguments = [part for name, value in options.items() if name != missing for part in (name, value)]
        refused(command(*arguments), f"{missing.removeprefix('--')} is missing", [])
    (tmp_path / "file").write_text("x")
    done = command("--base", base, "--method", "midus-hml", "--output", tmp_path / "file" / "out")
    refused(done, "output .*out cannot be made: .*file is not a writable folder", ["file"])


def test_inspect_and_strip_refuse_other_models(command, base, tmp_path, refused):
    for verb, words in (("inspect", []), ("strip", ["--output", tmp_path / "out"])):
        refused(command(verb, base, *words), "was not made by upscale: .* no 'upscale' entry", [])
        refused(command(verb, tmp_path, *words), "has no config.json", [])


def test_pickle_is_never_loaded(command, tmp_path):
    base, ran = save_base(tmp_path / "base"), tmp_path / "run"
    (base / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch " + str(ran).encode() + b"'\ntR.")
    assert command("--base", base, "--method", "llama-pro", "--output", tmp_path / "out").status == 0
    assert not ran.exists()
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()


def test_list_option_is_read_from_one_line():
    for value in ([768, 256, 16, 0], "768,256,16,0", "768, 256, 16, 0", "768,2.56e2,16,0"):
        options = parse_options(HierFFNOptions, {"sizes": value}, "method hier-ffn")
        assert options.sizes == [768, 256, 16, 0], value
        assert all(type(size) is int for size in options.sizes), value


def test_options_are_described():
    described = {row["name"]: row for row in describe_options(Presets)}
    assert described["steps"] == {"name": "steps", "type": "a whole number", "default": 10, "help": "how many"}
    types = {"kind": "a | b", "name": "a string | null", "scale": "a mapping"}
    assert {name: described[name]["type"] for name in types} == types
    assert described["scale"]["default"] == {"down": 0.5}
    assert described["preset"]["help"] == "several options at once (fast: steps=1, rate=0.5)"


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


@pytest.mark.parametrize(("name", "attributes", "message"), [
    ("midus-hml", {}, "method 'midus-hml' is already registered; choose another name"),
    ("x", {"identity": "auto"}, "method x has identity = 'auto'; expected True or False"),
])  # fmt: skip
def test_wrong_method_is_not_registered(name, attributes, message):
    get_method("midus-hml")
    before = dict(METHODS)
    with pytest.raises(ValueError, match=message):
        register_method(name)(type("X", (), attributes))
    assert before == METHODS
