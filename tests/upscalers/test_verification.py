"""Verification finds methods that lie, and leaves nothing; its models are read by module."""

import dataclasses
import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairs import in_turn
from processes.warm import run_warm
from tiny import prompt

from tests.upscalers.checkpoints import SMALL, edit_config, save_base, unverified, with_memory, write_tensors
from tests.upscalers.contents import logits, read_tensors, record_of
from tests.upscalers.methods import KINDS
from upscalers.checkpoint.base_checkpoint import open_base
from upscalers.checkpoint.safetensors_format import layout, read_tensor
from upscalers.methods.contract import Surgery, get_method
from upscalers.methods.midus import MidusHml
from upscalers.plan import Base, Plan
from upscalers.request import MethodError, VerificationError
from upscalers.runs import verify, writing
from upscalers.runs.upscale import upscale
from upscalers.runs.verify import StreamedModel
from upscalers.tensors.recipes import Copy, Fill, Recipe


def change_written(monkeypatch, name, change=lambda tensor: tensor + 1e-3):
    """Let a tensor of the result be another one than the method asked for."""
    honest = writing.keep_tokenizer

    def keep_tokenizer(source, partial, progress):
        tensors = read_tensors(partial)
        write_tensors(partial, {**tensors, name: change(tensors[name])})
        return honest(source, partial, progress)

    monkeypatch.setattr(writing, "keep_tokenizer", keep_tokenizer)


@pytest.mark.parametrize(("name", "place"), [
    ("embed_tokens.weight", "in the embedding"),
    ("layers.3.mlp.down_proj.weight", "in layer 3 (base 2)"),
    ("layers.4.memory.value_bank", "in layer 4 (new, between base 2 and base 3, made from 3)"),
    ("norm.weight", "after the last layer"),
])  # fmt: skip
def test_message_names_the_first_difference(tmp_path, monkeypatch, name, place):
    base = save_base(tmp_path / "base", prefix="")
    change_written(monkeypatch, name)
    expected = rf"by up to [\d.e-]+; expected a difference of exactly 0. They first differ {re.escape(place)}\.$"
    with pytest.raises(VerificationError, match=expected):
        with_memory(base, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_hidden_states_are_compared_too(tmp_path, monkeypatch):
    base = save_base(tmp_path / "base")
    tensors = read_tensors(base)
    write_tensors(base, {**tensors, "lm_head.weight": torch.zeros_like(tensors["lm_head.weight"])})
    change_written(monkeypatch, "model.layers.2.mlp.up_proj.weight")
    with pytest.raises(VerificationError, match=r"hidden states differ .* They first differ in layer 2 \(base 1\)"):
        with_memory(base, tmp_path / "out")


def test_out_of_memory_names_no_verify_and_leaves_nothing(base, tmp_path, monkeypatch):
    honest = verify.read_tensor

    def read_tensor(position):
        if any(part.startswith(".out") for part in position.file.parts):
            raise RuntimeError("can't allocate memory: you tried to allocate 8 bytes")
        return honest(position)

    monkeypatch.setattr(verify, "read_tensor", read_tensor)
    message = r"cannot run the upscaled model \(RuntimeError: can't allocate .* pass --no-verify\."
    with pytest.raises(VerificationError, match=message):
        with_memory(base, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("value", "dtype", "name", "share"), [
    (math.nan, torch.float32, "model.embed_tokens", 0.5),
    (math.inf, torch.bfloat16, "model.layers.2.mlp.down_proj", 0),
    (-math.inf, torch.float16, "lm_head", 1),
    (math.nan, torch.bfloat16, "lm_head", 1),
    (math.inf, torch.float32, "lm_head", 0),
], ids=str)  # fmt: skip
def test_non_finite_base_is_refused_unless_unverified(tmp_path, monkeypatch, value, dtype, name, share):
    monkeypatch.setattr("upscalers.tensors.writer._CHUNK_ELEMENTS", 250)
    base, name = save_base(tmp_path / "base", dtype=dtype), f"{name}.weight"
    tensors = read_tensors(base)
    tensors[name].flatten()[int(share * (tensors[name].numel() - 1))] = value
    write_tensors(base, tensors)
    with pytest.raises(ValueError, match=f"{name} holds NaN or infinite .* Repair the base, or pass --no-verify"):
        with_memory(base, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    assert with_memory(base, tmp_path / "out", verify=False).identity.checked is None


def test_identity_names_both_dtypes(command, base, tmp_path):
    for dtype, sides, same in (
        ("auto", "base and result in float32", "the same as the base."),
        ("bfloat16", "base rounded from float32 to bfloat16, result in bfloat16", "the same as the base in bfloat16."),
    ):
        words = ("--method", "midus-hml", "--set", "n=8", "--set", "k=2", "--dtype", dtype)
        done = command("--base", base, "--output", tmp_path / dtype, *words)
        assert f"logits: largest difference 0 ({sides})" in " ".join(done.out.split())
        assert record_of(tmp_path / dtype)["identity"] == {"checked": "logits", "max_abs_diff": 0.0, "compared": sides}
        assert f"Before any training it computes exactly {same}" in (tmp_path / dtype / "README.md").read_text()


PROMISED = "it computes exactly the same as the base, as the method promises; nothing was compared."
NOT_PROMISED = "before that it is not guaranteed to compute the same as the base; nothing was compared."


def overflow(base, part):
    """Let a row or a whole head of a float16 model overflow, whose weights are finite."""
    tensors = read_tensors(base)
    tensors["model.norm.weight"].fill_(1_000)
    tensors["lm_head.weight"][0 if part == "row" else slice(None)] = 60_000
    write_tensors(base, tensors)


@pytest.mark.parametrize(("method", "start"), [("midus-hml", PROMISED), ("solar", NOT_PROMISED)])
def test_card_and_report_say_that_nothing_was_compared(command, tmp_path, method, start):
    overflows = method == "midus-hml"
    base = save_base(tmp_path / "base", "llama" if overflows else "gemma3", dtype=torch.float16)
    words = ("--base", base, "--method", method, "--output", tmp_path / "out")
    if overflows:
        overflow(base, "head")
    else:  # transformers makes this model and cannot run it
        edit_config(base, query_pre_attn_scalar=-16)
        assert command(*words).status != 0
        words = (*words, "--no-verify")
    done = command(*words)
    promise = "promised" if start == PROMISED else "not promised"
    assert done.status == 0
    assert f"identity {promise} by the method; nothing was compared" in " ".join(done.out.split())
    assert ("every logit of the base is NaN or infinite, so nothing was compared" in done.err) == overflows
    record = record_of(tmp_path / "out")
    assert [*record["identity"].values(), record["kl_divergence"]] == [None] * 4
    assert f"{start}\n" in (tmp_path / "out" / "README.md").read_text()


def test_divergence_leaves_out_non_finite_logits(tmp_path):
    base = save_base(tmp_path / "base", dtype=torch.float16)
    overflow(base, "row")
    report = upscale(base=base, method="solar", output=tmp_path / "out")
    assert 0 < report.identity.max_abs_diff < math.inf
    assert report.kl_divergence is None
    json.loads((tmp_path / "out" / "upscale.json").read_text(), parse_constant=pytest.fail)


def test_non_finite_result_is_refused(base, tmp_path, monkeypatch):
    monkeypatch.setattr(MidusHml, "identity", False)
    change_written(monkeypatch, "model.layers.1.memory.value_bank", lambda tensor: tensor + math.inf)
    with pytest.raises(VerificationError, match=r"NaN or infinite where .* finite; .* another --dtype or method"):
        with_memory(base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


Layers = list[dict[str, Recipe]]
KEY = "self_attn.k_proj.weight"


def copied(name: str, layer: int) -> Callable[[Layers], None]:
    return lambda layers: layers[2].update({KEY: Copy((16, 32), f"model.layers.{layer}.{name}.weight")})


FAULTS: dict[str, tuple[Callable[[Layers], Any], str]] = {
    "tensors left out": (
        lambda layers: layers[2].clear(), r"layer 2: there is no recipe for self_attn.q_proj.weight, .* and 5 more; expected one"),
    "a layer left out": (lambda layers: layers.pop(), r"recipes for this many layers: \d+; expected \d+, as many as its plan"),
    "an unknown name": (
        lambda layers: layers[2].update({"mlp.up_projection.weight": Fill((48, 32), 1.0)}),
        "layer 2: there is a recipe for mlp.up_projection.weight; expected none except for self_attn.q_proj.weight, "),
    "a wrong shape": (
        lambda layers: layers[2].update({KEY: dataclasses.replace(layers[2][KEY], shape=(32, 16))}),
        rf"layer 2: {KEY} is \[32, 16\]; expected \[16, 32\]"),
    "a source of a wrong shape": (copied("self_attn.q_proj", 0), rf"{KEY} is made from .*, which is \[32, 32\]; expected \[16, 32\]"),
    "a missing source": (copied("self_attn.k_proj", 9), rf"{KEY} is made from .*; expected a tensor of the base"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_method_with_wrong_recipes_writes_nothing(name, base, tmp_path, monkeypatch):
    fault, message = FAULTS[name]
    sound = get_method("llama-pro").surgery

    def surgery(self, base, plan, seed) -> Surgery:
        surgery = sound(self, base, plan, seed)
        fault(surgery.layers)
        return surgery

    monkeypatch.setattr(get_method("llama-pro"), "surgery", surgery)
    for request in ({"dry_run": True}, {"output": tmp_path / "out", "verify": False}):
        with pytest.raises(MethodError, match=f"^method llama-pro.*{message}"):
            upscale(base=base, method="llama-pro", **request)
    assert list(tmp_path.iterdir()) == []


def test_plan_without_a_base_layer_is_refused(base, monkeypatch):
    plan = Plan((Base(0), Base(3), Base(3)), 4)
    monkeypatch.setattr(get_method("solar"), "plan", lambda *arguments: plan)
    with pytest.raises(MethodError, match="plan of method solar has no base layer 1, 2; expected all layers"):
        upscale(base=base, method="solar", dry_run=True)


@pytest.mark.parametrize(("method", "family", "changes", "error", "message"), [
    ("llama-pro", "llama", {"num_hidden_layers": 5}, MethodError, "num_hidden_layers = 5; expected 6, as many as its plan has"),
    ("llama-pro", "llama", {"vocab_size": 7}, MethodError, r"model.embed_tokens.weight is \[128, 32\]; expected \[7, 32\]"),
    ("llama-pro", "llama", {"intermediate_size": 47}, MethodError, r"layer 0: mlp.gate_proj.weight is .*; expected \[47, 32\]"),
    ("solar", "gemma2", {"tie_word_embeddings": False}, MethodError, r"outside the layers: .* no recipe for lm_head\.weight"),
    ("midus-hml", "qwen2", {"layer_types": ["full_attention"] * 6}, ValueError,
     "layer 3 has .* = 'full_attention' and its source, layer 2, has 'sliding_attention'"),
], ids=str)  # fmt: skip
def test_wrong_config_of_a_method_is_refused(method, family, changes, error, message, shared_base, monkeypatch):
    sound = get_method(method).surgery

    def surgery(*arguments) -> Surgery:
        surgery = sound(*arguments)
        return dataclasses.replace(surgery, config={**surgery.config, **changes})

    monkeypatch.setattr(get_method(method), "surgery", surgery)
    with pytest.raises(error, match=message):
        upscale(base=shared_base(family), method=method, dry_run=True)


LAYOUTS = {"one file": {}, "shards": {"max_shard_size": "20KB"}, "no prefix": {"prefix": ""}}
LAYOUTS |= {name: {"tie_word_embeddings": name == "tied"} for name in ("tied", "untied")}


def streamed(folder, dtype):
    return StreamedModel(folder, open_base(folder).tensors, dtype)


def streamed_logits(folder, dtype=torch.float32):
    return streamed(folder, dtype).logits(prompt(), lambda number, hidden: None)


@pytest.mark.parametrize(("layout_name", "stored"), in_turn(LAYOUTS, [torch.float32, torch.bfloat16]), ids=str)
def test_streamed_logits_equal_the_loaded_models(native_family, tmp_path, layout_name, stored):
    folder = save_base(tmp_path / "base", native_family, stored, **LAYOUTS[layout_name])
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(streamed_logits(folder, dtype), logits(folder, dtype, use_cache=False))


@pytest.mark.parametrize("kind", [*SMALL, "midus-hml, output projection and residual", "midus-hml, batch norm"])
def test_streamed_trained_memory_equals_the_loaded_one(family, tmp_path, kind):
    base, folder = save_base(tmp_path / "base", family), tmp_path / "out"
    upscale(base=base, output=folder, verify=False, **KINDS[kind])
    tensors = read_tensors(folder)
    trained = {name: 0.05 * torch.randn_like(t) for name, t in tensors.items() if name.endswith("value_bank")}
    write_tensors(folder, tensors | trained)
    assert torch.equal(streamed_logits(folder), logits(folder, torch.float32, use_cache=False))


@pytest.mark.parametrize("tied", [True, False])
def test_streamed_weights_are_read_once_and_released(shared_base, monkeypatch, tied):
    folder, seen = shared_base(tie_word_embeddings=tied), []
    reads: Counter[int] = Counter()

    def counted(entry):
        reads[entry.start] += 1
        return read_tensor(entry)

    def see(number, hidden):
        seen.append(number)
        assert all(parameter.is_meta for parameter in model._model.parameters())

    monkeypatch.setattr(verify, "read_tensor", counted)
    model, tensors = streamed(folder, torch.float32), open_base(folder).tensors
    model.logits(prompt(), see)
    assert seen == [0, 1, 2, 3, 4]
    embedding = tensors["model.embed_tokens.weight"].start
    assert reads == {entry.start: 1 + (tied and entry.start == embedding) for entry in tensors.values()}


def test_missing_or_misshapen_tensor_is_named(tmp_path):
    folder, name = save_base(tmp_path / "base"), "model.layers.1.mlp.up_proj.weight"
    tensors = open_base(folder).tensors
    without = {key: entry for key, entry in tensors.items() if key != name}
    misshapen = {**tensors, name: tensors["model.layers.1.mlp.down_proj.weight"]}
    for given, message in (
        (without, r"loads without model\.layers\.1\.mlp\.up_proj\.weight; expected every"),
        (misshapen, r"up_proj\.weight as \[48, 32\], which is \[32, 48\]; expected every"),
    ):
        with pytest.raises(VerificationError, match=message):
            StreamedModel(folder, given, torch.float32)


def test_code_of_a_checkpoint_is_never_run(base, tmp_path):
    folder = unverified(base, tmp_path / "upscaled")
    (code,) = folder.glob("*.py")
    code.write_text("raise SystemExit('the code of a checkpoint was run')\n")
    assert torch.isfinite(streamed_logits(folder)).all()


NOISE_BYTES = 30_000_000
# Nothing is forced to the disk, and what is freed goes back at once (M_TRIM_THRESHOLD), of one heap (M_ARENA_MAX): how much glibc
# keeps of it, and so by how much a peak grows, depends on the processor's kernels.
COMMAND = """
import ctypes, os
if hasattr(ctypes.CDLL(None), "mallopt"):
    assert ctypes.CDLL(None).mallopt(-1, 65536) and ctypes.CDLL(None).mallopt(-8, 1)
os.fsync = lambda file: None
from midus_hf.cli.upscale import main
main()
"""
# Of layers of 41 MB that compute little.
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
CONFIG |= {"tie_word_embeddings": False, "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 12_288}
CONFIG |= {"num_attention_heads": 16, "num_key_value_heads": 16}


def synthetic(folder, num_layers):
    """A checkpoint of one shard for each two layers, all holes: it takes no room on the disk."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": num_layers}))
    tensors, shards = open_base(folder, needs_weights=False).tensors, {}
    for name in tensors:
        parts = name.split(".")
        number = int(parts[2]) // 2 if parts[1] == "layers" else 0
        shards.setdefault(f"model-{number:05d}.safetensors", []).append(name)
    for file_name, names in shards.items():
        head, _ = layout([(name, tensors[name].dtype, tensors[name].shape) for name in names])
        with open(folder / file_name, "wb") as file:
            file.write(head)
            file.truncate(len(head) + sum(tensors[name].num_bytes for name in names))
    weight_map = {name: file_name for file_name, names in shards.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def upscaled(tmp_path, num_layers, verify):
    """The report of a run in a process of its own; whatever it wrote is deleted."""
    base = synthetic(tmp_path / f"base-{num_layers}", num_layers)
    words = ("--method", "midus-hml", "--output", tmp_path / "out", "--num-new-layers", 2, "--json", verify)
    done = run_warm(COMMAND, "--base", base, *words)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("verify", "checked"), [("--verify", "logits"), ("--no-verify", None)])
def test_peak_memory_is_independent_of_depth(verify, checked, tmp_path):
    small, large = (upscaled(tmp_path, layers, verify) for layers in (2, 4))
    assert large["identity"]["checked"] == checked
    assert large["bytes"]["written"] > small["bytes"]["written"] + 2 * NOISE_BYTES
    assert large["peak_rss_bytes"] < small["peak_rss_bytes"] + NOISE_BYTES
