"""A model that reads each module's weights when it is called computes what it computes in memory, and needs memory for one module."""

import json
import shutil
from collections import Counter

import pytest
import torch
from pairs import in_turn
from processes.warm import run_warm
from tiny import prompt

from tests.upscalers.checkpoints import SMALL, logits, read_tensors, save_base, unverified, write_tensors
from tests.upscalers.methods import KINDS
from upscalers.checkpoint.base_checkpoint import open_base
from upscalers.checkpoint.safetensors_format import layout, read_tensor
from upscalers.request import VerificationError
from upscalers.runs import verify
from upscalers.runs.upscale import upscale
from upscalers.runs.verify import StreamedModel

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
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}
CONFIG |= {"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 12_288}
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
    """The report of a run in a process of its own, whose peak is not that of the tests; whatever it wrote is deleted."""
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
