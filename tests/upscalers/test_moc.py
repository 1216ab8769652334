"""The method moc: the base computes the same with it, `strip` gives the base back, and requests that do not fit are refused."""

import itertools
import json
import re
import warnings

import pytest
import torch
from models.chapter_models import act
from pairs import in_turn
from tiny import prompt, save_tiny_model, tiny_model

from midus_hf.memory.chapters import Chapters
from tests.upscalers.checkpoints import SMALL_MEMORY, load, logits, read_tensors, same_tensors
from upscalers.runs.inspection import inspect_checkpoint
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

SMALL = {"memory_tokens": 24, "chapters": 12, "k": 2, "chunk_size": 3}
SITES = ("behind-attention", "behind-layer")
SHARES = {
    "shared": {},
    "own": {"share": "none"},
    "neighbours": {"share": "every:2", "layers": 3},
    "factors": {"bank_rank": 5},
}


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def trained(folder, output):
    """The model of a folder with acting memories, saved as training saves it."""
    model = load(folder)
    act(model)
    model.save_pretrained(output)
    return output


@pytest.mark.parametrize(
    ("share", "site_and_dtype"), in_turn(SHARES, itertools.product(SITES, [torch.float32, torch.bfloat16])), ids=str
)
def test_logits_are_those_of_the_base_and_strip_gives_it_back(native_family, share, site_and_dtype, tmp_path):
    site, dtype = site_and_dtype
    base = save_tiny_model(native_family, tmp_path / "base", dtype)
    options = {**SMALL, "site": site, **SHARES[share]}
    report = upscale(base=base, method="moc", output=tmp_path / "out", options=options)
    assert report.identity.checked == "logits" and report.identity.max_abs_diff == 0.0
    assert torch.equal(logits(tmp_path / "out"), logits(base))
    assert config_of(tmp_path / "out")["memory"][0]["site"] == site
    assert strip(tmp_path / "out", tmp_path / "stripped")["base_confirmed"] is True
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "stripped" / name).read_bytes() == (base / name).read_bytes()


def test_strip_and_inspect_say_that_a_memory_was_taken_out(command, base, tmp_path):
    upscale(base=base, method="moc", output=tmp_path / "out", options=SMALL)
    stripped = command("strip", tmp_path / "out", "--output", tmp_path / "stripped")
    assert stripped.status == 0 and "took out memory chapters. Its weights are the base's" in " ".join(
        stripped.out.split()
    )
    assert "took out memory chapters" in " ".join(command("inspect", tmp_path / "stripped").out.split())


@pytest.mark.parametrize(
    "options", [{"bank_width": 16}, {"kv_heads": 2}, {"routing": "token"}, {"routing": "sequence"}], ids=str
)
def test_what_is_made_block_by_block_is_checked_too(options, base, tmp_path):
    options = {**SMALL, **options}
    report = upscale(base=base, method="moc", output=tmp_path / "out", options=options, verify=False)
    assert report.identity.checked == "blocks" and report.identity.max_abs_diff == 0.0
    assert torch.equal(logits(tmp_path / "out"), logits(base))


@pytest.mark.parametrize(
    ("options", "of_layer", "of_model"),
    [
        ({}, {}, {"0.bank": [24, 32]}),
        ({"share": "none"}, {"bank": [24, 32]}, {}),
        ({"bank_rank": 5}, {}, {"0.bank": [24, 5], "0.bank_transform": [32, 5]}),
        ({"kv_heads": 2}, {"key_projection.weight": [16, 32], "value_projection.weight": [16, 32]}, {"0.bank": [24, 32]}),
        ({"share": "every:1"}, {}, {"0.bank": [24, 32], "1.bank": [24, 32]}),
        ({"bank_width": 16}, {"query_projection.weight": [16, 32], "output_projection.weight": [32, 16]}, {"0.bank": [24, 16]}),
    ],
    ids=str,
)  # fmt: skip
def test_tensors_have_their_names(options, of_layer, of_model, base, tmp_path):
    upscale(
        base=base, method="moc", output=tmp_path / "out", options={**SMALL, "layers": [0, 3], **options}, verify=False
    )
    found = {name: list(tensor.shape) for name, tensor in read_tensors(tmp_path / "out").items() if ".memor" in name}
    expected = {
        "norm_weight": [32],
        "router_weight": [12, 32],
        "router_bias": [12],
        "query_projection.weight": [32, 32],
        "key_projection.weight": [32, 32],
        "value_projection.weight": [32, 32],
        "output_projection.weight": [32, 32],
        **of_layer,
    }
    if "bank_width" in options:
        expected |= {"key_projection.weight": [16, 16], "value_projection.weight": [16, 16]}
    names = {
        f"model.layers.{layer}.memories.chapters.{name}": shape for layer in (0, 3) for name, shape in expected.items()
    }
    names |= {f"model.memory_tables.chapters.{name}": shape for name, shape in of_model.items()}
    assert found == names


@pytest.fixture(scope="module")
def deep_base(tmp_path_factory):
    """A tiny Llama of sixteen layers; nobody may change it."""
    base = tmp_path_factory.mktemp("deep") / "base"
    tiny_model("llama", num_hidden_layers=16).save_pretrained(base)
    return base


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (None, [2, 6, 10, 14]),
        (0.25, [2, 6, 10, 14]),
        (4, [2, 6, 10, 14]),
        (0.01, [8]),
        (1, [8]),
        (2, [4, 12]),
        ([0, 5, 15], [0, 5, 15]),
        ("all", list(range(16))),
        ("early:3", [0, 1, 2]),
        ("middle:4", [6, 7, 8, 9]),
        ("middle:3", [6, 7, 8]),
        ("late:3", [13, 14, 15]),
    ],
)
def test_a_quarter_of_the_layers_has_it_unless_others_are_named(layers, expected, deep_base, tmp_path):
    options = {**SMALL, **({} if layers is None else {"layers": layers})}
    upscale(base=deep_base, method="moc", output=tmp_path / "out", options=options, verify=False)
    (entry,) = config_of(tmp_path / "out")["memory"]
    assert entry["layers"] == expected and entry["type"] == entry["name"] == "chapters"
    assert {key: entry[key] for key in SMALL} == SMALL


@pytest.mark.parametrize("site", SITES)
def test_what_acts_is_after_saving_and_loading_what_it_was(native_family, site, shared_base, tmp_path):
    options = {**SMALL, "site": site, "share": "every:1"}
    upscale(base=shared_base(native_family), method="moc", output=tmp_path / "out", options=options, verify=False)
    model = load(tmp_path / "out")
    act(model)
    model.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        expected = model(prompt()).logits
    assert torch.equal(logits(tmp_path / "saved"), expected)
    assert not torch.equal(expected, logits(shared_base(native_family)))
    tensors = read_tensors(tmp_path / "saved")
    assert tensors.keys() == read_tensors(tmp_path / "out").keys()
    assert same_tensors(tmp_path / "saved", trained(tmp_path / "saved", tmp_path / "again"))


@pytest.mark.parametrize("verify", [True, False])
def test_verification_tells_memories_that_choose_by_the_prompt_what_that_is(verify, base, tmp_path):
    options = {**SMALL, "routing": "prompt"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        upscale(base=base, method="moc", output=tmp_path / "once", options=options, verify=verify)
        report = upscale(base=tmp_path / "once", method="moc", output=tmp_path / "out", options=options, verify=verify)
    assert report.identity.max_abs_diff == 0.0


SECOND = {
    "midus-hml": {"method": "midus-hml", "options": SMALL_MEMORY},
    "llama-pro": {"method": "llama-pro", "num_new_layers": 2},
    "moc": {"method": "moc", "options": {**SMALL, "layers": [1, 2], "routing": "token"}},
}
MOC = {"method": "moc", "options": {**SMALL, "layers": [1, 3]}}


def check_stack(base, first, second, tmp_path):
    """A second upscaling of a trained model changes nothing that it computes, and both are stripped, one after the other."""
    upscale(base=base, output=tmp_path / "first", **first)
    once = trained(tmp_path / "first", tmp_path / "once")
    report = upscale(base=once, output=tmp_path / "twice", **second)
    assert report.identity.max_abs_diff == 0.0
    assert torch.equal(logits(tmp_path / "twice"), logits(once))
    assert strip(tmp_path / "twice", tmp_path / "stripped")["base_confirmed"] is True
    assert same_tensors(tmp_path / "stripped", once)
    assert (tmp_path / "stripped" / "config.json").read_bytes() == (once / "config.json").read_bytes()
    strip(tmp_path / "stripped", tmp_path / "bare")
    assert same_tensors(tmp_path / "bare", base)
    return load(tmp_path / "twice"), config_of(tmp_path / "twice")["memory"]


@pytest.mark.parametrize(("second", "family"), in_turn(SECOND, ["qwen2", "gemma3"]))
def test_another_method_goes_on_top(second, family, shared_base, tmp_path):
    model, memory = check_stack(shared_base(family), MOC, SECOND[second], tmp_path)
    assert not torch.equal(logits(tmp_path / "once"), logits(shared_base(family)))
    if second == "moc":
        assert [(entry["name"], entry["layers"]) for entry in memory] == [("chapters", [1, 3]), ("chapters-2", [1, 2])]
    else:
        assert memory[0]["layers"] == [2, 5] or memory[0]["layers"] == [1, 4], "layers were inserted in front of these"
    hosts = [index for index, layer in enumerate(model.model.layers) if "chapters" in getattr(layer, "memories", {})]
    assert hosts == memory[0]["layers"]


@pytest.mark.parametrize(("first", "family"), in_turn(["midus-hml", "llama-pro"], ["qwen3", "gemma2"]))
def test_it_goes_on_top_of_another_method(first, family, shared_base, tmp_path):
    layers = [0, 2] if first == "midus-hml" else [1, 4]
    second = {"method": "moc", "options": {**SMALL, "layers": layers}}
    _, memory = check_stack(shared_base(family), SECOND[first], second, tmp_path)
    assert memory[-1]["layers"] == layers


def test_inspect_and_methods_tell_of_it(base, command, tmp_path):
    upscale(base=base, method="moc", output=tmp_path / "out", options={**SMALL, "layers": [1, 3]}, verify=False)
    described = json.dumps(inspect_checkpoint(tmp_path / "out"), default=str)
    assert "chapters" in described and "memory_tokens" in described
    (method,) = command("methods", "moc", "--json").json()
    options = {option["name"]: option["default"] for option in method["options"]}
    assert options["layers"] == 0.25 and options["site"] == "behind-attention" and options["routing"] == "chunk"
    assert method["identity"] is True and "Mixture of Chapters" in json.dumps(method["paper"])


REFUSED = [
    (["k=9", "chapters=8"], r"k is 9; expected 1 <= k <= 7, the chapters = 8 less shared_chapters = 1\. Lower k or raise chapters\."),
    (["k=0"], r"k is 0; expected 1 <= k <= 63, "),
    (["shared_chapters=64"], r"shared_chapters is 64; expected fewer than chapters = 64, so that some are left for the router\."),
    (["shared_chapters=2", "chapters=2"], r"shared_chapters is 2; expected fewer than chapters = 2, "),
    (["shared_chapters=63"], r"k is 4; expected 1 <= k <= 1, the chapters = 64 less shared_chapters = 63\."),
    (["chapters=5", "k=1"], r"chapters is 5, which does not divide memory_tokens = 4096; expected .* The nearest that do are 4, 8\."),
    (["chapters=9999"], r"chapters is 9999, which does not divide memory_tokens = 4096; .* that do are 4096\."),
    (["heads=5"], r"heads is 5, which does not divide hidden_size = 32; expected a divisor\. Set heads\."),
    (["bank_width=18"], r"heads is 4, which does not divide bank_width = 18; expected a divisor\. Set heads\."),
    (["kv_heads=3"], r"kv_heads is 3, which does not divide the 4 query heads; expected a divisor\."),
    (["routing=chunks"], r"routing is 'chunks'; expected one of: chunk, prompt, token, sequence"),
    (["weighting=none"], r"weighting is 'none'; expected one of: released, logit_bias, paper"),
    (["first_chunk=65"], r"first_chunk is 65; expected 1 to chunk_size = 64, or null\. Lower it or raise chunk_size\."),
    (["first_chunk=0"], r"first_chunk is 0; expected 1 to chunk_size = 64, or null"),
    (["balance=even"], r"balance is 'even'; expected one of: routed, per-choice, released"),
    (["share=some"], r"share is 'some'; expected all, none, or every:K such as every:2\."),
    (["share=every:0"], r"share is 'every:0'; expected all, none, or every:K"),
    (["share=every:2x"], r"share is 'every:2x'; expected all, none, or every:K"),
    (["chunk_size=0"], r"chunk_size is 0; expected 1 or more\."),
    (["memory_tokens=0"], r"memory_tokens is 0; expected 1 or more\."),
    (["chapters=0"], r"chapters is 0; expected 1 or more\."),
    (["shared_chapters=-1"], r"shared_chapters is -1; expected 0 or more\."),
    (["bank_rank=0"], r"bank_rank is 0; expected 1 or more, or null\."),
    (["heads=0"], r"heads is 0; expected 1 or more, or null\."),
    (["bank_rank=4", "bank_width=8"], r"bank_rank is 4 and bank_width is 8; expected one of them\."),
    (["routed_scale=0"], r"routed_scale is 0(\.0)?; expected a number above 0\."),
    (["routed_scale=.inf"], r"routed_scale is inf; expected a number\."),
    (["router_aux_loss_coef=-1"], r"router_aux_loss_coef is -1(\.0)?; expected 0 or more\."),
    (["router_z_loss_coef=.nan"], r"router_z_loss_coef is nan; expected a number\."),
    (["site=inserted"], r"site is 'inserted'; expected one of: behind-attention, behind-layer\."),
    (["chapter=2"], r"moc has no option 'chapter'\. Did you mean 'chapters'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_wrong_request_is_refused_in_one_line(settings, message, base, command, tmp_path):
    arguments = [part for setting in settings for part in ("--set", setting)]
    outcome = command("--base", base, "--method", "moc", "--output", tmp_path / "out", *arguments)
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.startswith("upscale: ") and outcome.err.count("\n") == 1
    assert re.search(message, outcome.err), outcome.err
    assert list(tmp_path.iterdir()) == []


def test_a_model_has_as_many_layers_of_it_as_the_entry_names(base, tmp_path):
    upscale(base=base, method="moc", output=tmp_path / "out", options={**SMALL, "layers": "all"}, verify=False)
    assert sum(isinstance(module, Chapters) for module in load(tmp_path / "out").modules()) == 4
