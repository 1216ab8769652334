"""Every causal type of the installed Transformers hosts memory, or is refused with a clear reason."""

import dataclasses
import itertools
import json
import re

import pytest
import torch
import transformers
from models.hosting import host_config
from packaging.version import Version
from pairs import by_default, in_turn
from tiny import NATIVE_FAMILIES
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama.modeling_llama import LlamaModel

from midus_hf.anatomy import types
from midus_hf.anatomy.types import FILE, MAIN_TYPES, WIRINGS, UnknownType, listed_types, model_type_of
from midus_hf.memories.hierarchical.layer import HierKV
from midus_hf.memories.hosting import layer, sites
from midus_hf.memories.hosting.layer import HostLayer
from midus_hf.memories.hosting.parts import PROJECTIONS, MemoryInputs, MissingPartError
from midus_hf.memories.hosting.sites import ChangesProjections
from midus_hf.memories.moda import layer as depth_layer
from midus_hf.memories.moda.layer import ModaSite
from midus_hf.models.families import FAMILIES, template
from midus_hf.models.families.template import host_type
from scripts.anatomy import tiny
from scripts.anatomy.__main__ import composite_types, main, proven_row
from scripts.anatomy.architecture import architecture_of
from scripts.anatomy.proof import UnprovenArchitecture, prove
from scripts.anatomy.tiny import tiny_config, tiny_model

TYPES = sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if not name.startswith("midus_"))
# What `python -m scripts.anatomy` has written of each type.
ROWS = json.loads(FILE.read_text(encoding="utf-8"))
# Why types are refused, each with a type that is. A failure to build or to run a tiny model is none of the reasons: the type needs
# sizes of its own.
REASONS = {
    "bart": r"'.*' is an encoder with a decoder; expected a decoder alone\.",
    "bert": r"'.*' is an encoder, whose tokens read later tokens; expected a decoder\.",
    "gpt2": r"'.*' has its layers at [\w.]+; expected a type whose decoder layers are at model\.layers\.",
    "longcat_flash": r"'.*' has \d+ layers at model\.layers where num_hidden_layers is \d+; expected equal numbers\.",
    "xlm": r"'.*' has no single list of decoder layers; expected one at model\.layers\.",
    "gemma3": r"'.*' holds a language model within a composite model; expected the language model alone\. If transformers .*",
    "gemma3n_text": r"the residual stream of '.*' is not one tensor \[B, T, D\]; expected layers that read and return one\.",
}
OTHER_REASONS = [
    r"'.*' has \d+ layers where num_hidden_layers of its saved config is (\d+|None); expected equal numbers\.",
    r"'.*' does not pass all keyword arguments on to its decoder layers; expected a stack that does\.",
]
# Types and wirings that are refused by their proof rather than for a part that is lacking, and what the proof says.
OTHER_LOGITS = "and of a base that states what it computes differ by up to"
EXCEPTIONS = [
    (
        ("recurrent_gemma",),
        [wiring for wiring in WIRINGS if wiring not in ("hier-lora-ffn", "moda")],
        "the model returns no cache"),
    # The residual stream is in float32, and memories in bfloat16.
    (("zaya",), ["behind-layer"], "the proof ended with RuntimeError"),
    # Norms stand after the rotation, or attention has another output per head, or another function rotates.
    (("hunyuan_v1_dense", "hunyuan_v1_moe"), ["hier-kv", "moda"], OTHER_LOGITS),
    (("stablelm", "diffllama", "llama4_text", "phi"), ["hier-kv", "moda"], "the proof ended with"),
    # Masks that depend on values, and sinks, which take a share of the softmax.
    (("gpt_oss", "doge", "flint", "recurrent_gemma"), ["moda"], OTHER_LOGITS),
    # An inserted layer moves what follows from the index of a layer, not from a list in the config.
    (("bamba", "ernie4_5_moe", "jamba", "llama4_text", "recurrent_gemma"), ["inserted"], "a model with memory has other tensors"),
    (("diffllama", "beam"), ["inserted"], "logits at initialisation in"),
    (("inkling_text",), ["inserted"], "the proof ended with"),
]  # fmt: skip
UNPROVEN = {pair: message for types, wirings, message in EXCEPTIONS for pair in itertools.product(types, wirings)}
# By default the first pair of each exception, linear and latent attention, and a type that is refused; with the product all.
SAMPLE = [(types[0], wirings[0]) for types, wirings, _ in EXCEPTIONS]
SAMPLE += [("qwen3_5_text", "hier-kv"), ("deepseek_v3", "hier-lora-ffn"), ("gpt2", "skip")]
SAMPLE = [pair for pair in SAMPLE if pair[0] in TYPES]
# Types whose small models some versions of transformers, before 5.23, cannot build.
LARGE_BEFORE = ("cohere_compass_text",)
# Sites of the wirings that are named after a type of memory.
INSIDE = dict.fromkeys(("hier-lora-qk", "hier-lora-vo", "hier-kv", "moda"), "inside-attention")
INSIDE["hier-lora-ffn"] = "inside-ffn"
NO_PART = "has no part for a memory at the site '{}'; expected another site, such as 'behind-layer', or a layer that has the part."
# What a refusal names, where that is not the type.
TOLD = {"gpt2": "at transformer.h;", "longcat_flash": "2 layers at model.layers where"}


def refusal_of(model_type: str) -> str | None:
    try:
        architecture_of(model_type)
    except UnknownType as error:
        return str(error)
    return None


@pytest.mark.parametrize("model_type", by_default({**REASONS, **dict(SAMPLE)}, dict.fromkeys([*REASONS, *TYPES])))
def test_type_is_hosted_or_refused_with_a_named_reason(model_type):
    refusal = refusal_of(model_type)
    if refusal is not None and model_type in LARGE_BEFORE and Version(transformers.__version__) < Version("5.23"):
        pytest.skip(refusal)
    if refusal is None:
        parts = architecture_of(model_type).layers
        assert model_type not in REASONS
        assert parts
        assert all(issubclass(layer, nn.Module) for layer in parts)
    elif model_type in REASONS:
        assert re.fullmatch(REASONS[model_type], refusal)
        assert TOLD.get(model_type, model_type) in refusal
    else:
        told = [reason for reason in (*REASONS.values(), *OTHER_REASONS) if re.fullmatch(reason, refusal)]
        assert len(told) == 1, refusal


@pytest.mark.parametrize(("model_type", "wiring"), by_default(SAMPLE, itertools.product(TYPES, WIRINGS)))
def test_hosted_type_is_proven_or_lacks_the_part(model_type, wiring):
    refusal = refusal_of(model_type)
    if refusal is not None:
        with pytest.raises(UnknownType) as refused:
            prove(model_type, wiring)
        assert str(refused.value) == refusal
        return
    try:
        prove(model_type, wiring)
    except UnprovenArchitecture as error:
        assert (model_type, wiring) in UNPROVEN
        assert UNPROVEN[model_type, wiring] in str(error)
    except MissingPartError as error:
        assert str(error).endswith(NO_PART.format(INSIDE.get(wiring, wiring)))
    else:
        assert (model_type, wiring) not in UNPROVEN


def noisy_in(dtype):
    def with_added(added, *inputs):
        result = added(*inputs)
        return result * 1.01 if result.dtype == dtype else result

    return with_added


def with_another_tensor(host, self, *args):
    host(self, *args)
    self.gain = nn.Parameter(torch.ones(1))


def failing(forward, *args, **kwargs):
    raise KeyError("depth")


def added_twice(added, self, at, stream, *read):
    return added(self, at, added(self, at, stream, *read), *read)


def reading_the_stream(added, self, at, stream, read, inputs):
    return added(self, at, stream, stream, inputs)


def not_masked(forward, *args, **kwargs):
    return forward(*args, **{**kwargs, "attention_mask": None})


def doubled_in_steps(read, self, name, stream, *inputs):
    return read(self, name, stream, *inputs) * (1 + (stream.shape[1] == 1))


STATED = r"logits of a memory at {} and of a base that states what it computes differ by up to .*; expected equal"
NOISY = r"logits at initialisation in {} differ by up to .*; expected equal bits\."
BESIDE, SITES = "beside-ffn", ("beside-ffn", "behind-attention", "behind-layer")
# What is wrong: the wiring, a method of the layer, what runs in its place with it and its arguments, and what the proof says.
WRONG_LAYERS = {
    **{f"twice {site}": (site, "with_added", added_twice, STATED.format(site)) for site in SITES},
    **{f"of the stream {site}": (site, "with_added", reading_the_stream, STATED.format(site)) for site in SITES[:2]},
    "doubled": ("skip", "read", lambda read, *inputs: 2 * read(*inputs), STATED.format("skip")),
    "not reached": (BESIDE, "with_added", lambda added, self, at, stream, *_: stream, r"a memory at .* changes no logit"),
    "noisy in bfloat16": (BESIDE, "with_added", noisy_in(torch.bfloat16), NOISY.format("bfloat16")),
    "noisy in float32": (BESIDE, "with_added", noisy_in(torch.float32), NOISY.format("float32")),
    "without a mask": (BESIDE, "forward", not_masked, r"logits with padding at initialisation in \w+ differ"),
    "detached": (BESIDE, "read", lambda read, *inputs: read(*inputs).detach(), r"model\.\S+\.memories\.\S+ takes no gradient"),
    "doubled in steps": (BESIDE, "read", doubled_in_steps, r"with a cache, logits differ by \S+ from those of one pass"),
    "with another tensor": (BESIDE, "host", with_another_tensor, r"a model with .* other tensors .* model\.layers\.0\.gain\."),
    "raising": (BESIDE, "forward", failing, "the proof ended with KeyError: 'depth'"),
}  # fmt: skip


@pytest.mark.parametrize(("wiring", "name", "change", "message"), WRONG_LAYERS.values(), ids=WRONG_LAYERS)
def test_wrong_wiring_of_a_layer_fails_the_proof(wiring, name, change, message, monkeypatch):
    (layer_class,) = FAMILIES["llama"].model_class.layer_classes
    # transformers gives each layer class a forward of its own
    owner = layer_class if name in vars(layer_class) else HostLayer
    method = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, *args, **kwargs: change(method, self, *args, **kwargs))
    with pytest.raises(UnprovenArchitecture, match=f"^llama: {message}"):
        prove.__wrapped__("llama", wiring)


def without_the_last_projection(hook_projections):
    def fewer(self, part):
        hook_projections(self, part)
        *_, last = self.layer.classes[next(iter(self.layer.sites))].projections
        del self._hooks[f"{part}.{self.layer.projection(part, last)[0]}"]

    return fewer


def with_blocks_of_the_next_layer(of):
    return lambda self, memory_class, name, layer: of(self, memory_class, name, (layer + 1) % 4)


def left_as_they_are(function):
    return lambda attention, heads, *others: heads


def with_the_last_rows_first(stacked_rows):
    return lambda *inputs: stacked_rows(*inputs)[::-1]


# Of memories inside attention or feed-forward networks: a type, a wiring, and what is changed of what.
WRONG_INSIDE = [
    ("qwen3", "hier-lora-qk", ChangesProjections, "hook_projections", without_the_last_projection),
    ("qwen3", "hier-lora-vo", PROJECTIONS, "value", lambda _: ("k_proj",)),
    ("phi3", "hier-lora-ffn", layer, "stacked_rows", with_the_last_rows_first),
    ("qwen3", "hier-kv", MemoryInputs, "arguments_for", with_blocks_of_the_next_layer),
    ("qwen3", "hier-kv", sites, "unrotated", left_as_they_are),
    ("qwen3", "moda", ModaSite, "_projected", lambda pair: lambda *inputs: pair(*inputs)[::-1]),
    ("qwen3", "moda", depth_layer, "normalised_keys", left_as_they_are),
]


@pytest.mark.parametrize(("model_type", "wiring", "owner", "name", "change"), WRONG_INSIDE)
def test_wrong_wiring_inside_a_part_fails_the_proof(model_type, wiring, owner, name, change, monkeypatch):
    """In Qwen 3, since it normalises queries and keys."""
    if isinstance(owner, dict):
        monkeypatch.setitem(owner, name, change(owner[name]))
    else:
        monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    with pytest.raises(UnprovenArchitecture, match=rf"^{model_type}: logits .*differ by up to"):
        prove.__wrapped__(model_type, wiring)


def test_block_without_gradient_fails_the_proof(monkeypatch):
    attend = HierKV.forward
    monkeypatch.setattr(HierKV, "forward", lambda self, *heads, **inputs: attend(self, *heads, **inputs).detach())
    message = r"^llama: memory_\w+ of the blocks of level 1 for layer 0 takes no gradient"
    with pytest.raises(UnprovenArchitecture, match=message):
        prove.__wrapped__("llama", "hier-kv")


def test_memory_type_without_proof_needs_all_of_its_site():
    refused = dict.fromkeys(WIRINGS, "no part")
    row = dataclasses.replace(model_type_of("llama"), wirings=("skip", "hier-kv"), refused=refused)
    assert row.refusal("skip", "ultramem") is None
    assert row.refusal("inside-attention", "hier-kv") is None
    assert row.refusal("behind-layer", "chapters") == "no part"
    assert row.refusal("inside-attention", "toy") == row.refusal("inside-ffn", "toy") == "no part"
    assert model_type_of("llama").refusal("inside-attention", "toy") is None


# Each wiring on a type with and on one without norms after its parts, and the others in turn.
PROVEN_HERE = {*itertools.product(WIRINGS, ("llama", "gemma3_text")), *in_turn(WIRINGS, MAIN_TYPES)}
PROVEN = by_default(PROVEN_HERE, itertools.product(WIRINGS, MAIN_TYPES), fewest=in_turn(WIRINGS, MAIN_TYPES))


@pytest.mark.parametrize(("wiring", "model_type"), PROVEN)
def test_main_types_are_proven(wiring, model_type):
    prove(model_type, wiring)


def test_main_types_have_layouts_and_rows():
    assert {*MAIN_TYPES} == {family.config_class.model_type for family in NATIVE_FAMILIES.values()}
    assert [name for name in listed_types() if model_type_of(name).layout] == sorted(MAIN_TYPES)


@pytest.mark.parametrize("model_type", by_default(["cohere", "gpt2", "phi3", "llava"], ROWS))
def test_row_of_a_type_is_what_the_command_writes(model_type):
    """What a proof says of a wiring that is refused may have other numbers on another machine."""
    row, written = proven_row(model_type), ROWS[model_type]
    if isinstance(row, str):
        assert row == written
        return
    assert row["transformers"].items() <= written["transformers"].items() if "layers" in row else row["transformers"]
    others = (row.keys() | written.keys()) - {"transformers", "refused"}
    assert {key: row.get(key) for key in others} == {key: written.get(key) for key in others}
    assert row.get("refused", {}).keys() == written.get("refused", {}).keys()


@pytest.mark.product
def test_every_type_has_a_row():
    assert {*TYPES, *composite_types()} <= ROWS.keys()


@pytest.fixture
def fresh():
    def forget():
        types._rows.cache_clear()
        types.type_of.cache_clear()

    yield forget
    forget()


def test_unlisted_type_is_refused_with_its_proof_command(fresh, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(types, "FILE", tmp_path / "types.json")
    (tmp_path / "types.json").write_text(json.dumps({name: row for name, row in ROWS.items() if name != "cohere"}))
    fresh()
    with pytest.raises(UnknownType, match=r"'cohere' is not among the \d+ types .*python -m scripts\.anatomy cohere$"):
        model_type_of("midus_cohere")
    assert main(["gpt2", "cohere"]) == 1
    fresh()
    assert model_type_of("cohere").wirings == tuple(ROWS["cohere"]["wirings"])
    own = types.user_cache() / "types" / "phi3.json"
    own.write_text(json.dumps({**ROWS["phi3"], "class_name": "Own"}))
    for version, name in ((types.installed_version(), "Phi3"), ("9.1", "Own")):  # the file's row has no 9.1
        monkeypatch.setattr(types, "installed_version", lambda version=version: version)
        fresh()
        assert model_type_of("phi3").class_name == name
    own.write_text("{")
    fresh()
    with pytest.raises(ValueError, match=r"phi3\.json is not JSON; expected what scripts\.anatomy wrote"):
        model_type_of("llama")


def test_types_are_known_without_a_home(no_home, fresh, capsys):
    fresh()
    assert types.user_cache() is None
    assert model_type_of("llama").class_name == "Llama"
    with pytest.raises(SystemExit, match="2"):
        main(["cohere"])
    assert "there is no home folder to keep rows in; set HOME or XDG_CACHE_HOME" in capsys.readouterr().err


def test_other_transformers_needs_the_same_tensors(monkeypatch):
    monkeypatch.setattr(template, "installed_version", lambda: "9.1")
    row = model_type_of("llama")
    template._check_version(row)
    proven = r"'llama' was proven with transformers [\d., ]+, and "
    other = dataclasses.replace(row, config={**row.config, "attention_bias": True})
    with pytest.raises(UnknownType, match=proven + r"has other tensors in [\d.]+;"):
        template._check_version(other)
    unmade = dataclasses.replace(row, config={"hidden_size": "wide"})
    cannot_be_made = (
        r"a model of it cannot be made here, with [\d.]+ \(\w+: (?s:.*)load the model with memory before it"
    )
    with pytest.raises(UnknownType, match=proven + cannot_be_made):
        template._check_version(unmade)


def test_layer_without_the_part_is_named():
    message = r"^layer 0 of class \w*MambaDecoderLayer " + re.escape(NO_PART.format(BESIDE))
    with pytest.raises(ValueError, match=message):
        prove("zamba2", "beside-ffn")


@pytest.mark.parametrize("model_type", ["jamba", "qwen3_5_text"])
def test_inserted_layer_without_heads_is_refused(model_type):
    """Refuse a block in the place of a layer that mixes tokens by a recurrence."""
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip(f"the installed transformers has no {model_type}")
    if model_type not in FAMILIES:
        host_type(model_type)
    config = host_config(tiny_config(model_type), [{"type": "midus-linear", "slots": 4, "k": 2, "layers": [0]}])
    with pytest.raises(MissingPartError, match=r"^layer 0 of class \w+ " + re.escape(NO_PART.format("inserted"))):
        FAMILIES[model_type](config)


UNBUILT = [
    ({"hidden_act": "gelo"}, None, r"a tiny model of 'llama' cannot be built \(.*'gelo'.*\)\. Add the sizes"),
    ({}, 1000, r"a tiny model of 'llama' cannot be built \(ValueError: it has [\d,]+ parameters\)\."),
    (None, None, r"(?s)'llama' has no tiny config \(.*\)\. Add the sizes that it needs to _SMALL_OF_TYPE in scripts"),
]


@pytest.mark.parametrize(("sizes", "most", "message"), UNBUILT)
def test_tiny_model_that_cannot_be_built_is_named(sizes, most, message, monkeypatch):
    if sizes is None:
        monkeypatch.setitem(tiny._SMALL_OF_TYPE, "llama", {"num_attention_heads": "four"})
    if most is not None:
        monkeypatch.setattr(tiny, "_MOST_PARAMETERS", most)
    with pytest.raises(UnknownType, match=message):
        tiny_model("llama", **sizes or {})


def test_tiny_model_is_deterministic_and_keeps_the_rng():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second, other = tiny_model("qwen3"), tiny_model("qwen3"), tiny_model("qwen3", seed=1)
    assert torch.equal(torch.rand(3), expected)
    tensors, again = first.state_dict(), second.state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in tensors.items())
    assert not torch.equal(other.lm_head.weight, first.lm_head.weight)


def keeping_arguments_from_its_layers(forward):
    return lambda self, memory_inputs=None, **kwargs: forward(self, **kwargs)


def refusing_an_argument(forward):
    names = ("attention_mask", "cache", "input_ids", "inputs_embeds", "past_key_values", "position_ids", "use_cache")

    def strict(self, **kwargs):
        if other := kwargs.keys() - {*names}:
            raise TypeError(f"forward() got an unexpected keyword argument {min(other)!r}")
        return forward(self, **kwargs)

    return strict


UNREACHED = [
    (keeping_arguments_from_its_layers, "'llama' does not pass all keyword arguments on to its decoder layers"),
    (refusing_an_argument, r"a pass through a tiny model of 'llama' fails with an .*TypeError: .*memory_inputs"),
]


@pytest.mark.parametrize(("change", "message"), UNREACHED)
def test_stack_without_layer_arguments_is_refused(change, message, monkeypatch):
    monkeypatch.setattr(LlamaModel, "forward", change(LlamaModel.forward))
    with pytest.raises(UnknownType, match=f"^{message}"):
        architecture_of.__wrapped__("llama")
