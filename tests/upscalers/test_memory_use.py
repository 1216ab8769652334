"""Upscaling needs memory for what one recipe reads, and for one module of both models; never for a model."""

import json
import shutil

from processes.warm import run_warm

from upscalers.checkpoint.base_checkpoint import open_base
from upscalers.checkpoint.safetensors_format import layout

LIMIT_BYTES, NOISE_BYTES = 1_000_000_000, 30_000_000
# Nothing is forced to the disk.
COMMAND = """
import os
os.fsync = lambda file: None
from midus_hf.cli.upscale import main
main()
"""
# What is freed goes back at once (M_TRIM_THRESHOLD), of one heap (M_ARENA_MAX): how much glibc keeps of it, and so by how much a peak
# grows, depends on the processor's kernels.
KEEPING_NOTHING = """
import ctypes
if hasattr(ctypes.CDLL(None), "mallopt"):
    assert ctypes.CDLL(None).mallopt(-1, 65536) and ctypes.CDLL(None).mallopt(-8, 1)
"""
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}

# A layer of 41 MB that computes little.
NARROW = {"hidden_size": 512, "intermediate_size": 12_288}


def synthetic(folder, num_layers, **changes):
    """A checkpoint of 134 MB per layer, one shard for each two layers, all holes: it takes no room on the disk."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes, "num_hidden_layers": num_layers}))
    tensors = open_base(folder, needs_weights=False).tensors
    shards = {}
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


def upscaled(tmp_path, num_layers, *arguments, verify="--no-verify", allocator=KEEPING_NOTHING, **changes):
    """The report of a run in a process of its own, whose peak is not that of the tests; whatever it wrote is deleted."""
    base = synthetic(tmp_path / f"base-{num_layers}-{verify}", num_layers, **changes)
    done = run_warm(
        allocator + COMMAND, "--base", base, "--method", "midus-hml", "--output", tmp_path / "out", "--num-new-layers", 2, verify,
        "--json", *arguments,
    )  # fmt: skip
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_memory_stays_below_a_gigabyte_and_what_is_written(tmp_path):
    report = upscaled(tmp_path, 4)
    assert report["peak_rss_bytes"] < min(report["bytes"]["written"], LIMIT_BYTES)


def test_memory_does_not_grow_with_the_model_where_both_models_are_compared(tmp_path):
    small, large = (upscaled(tmp_path, layers, verify="--verify", **NARROW) for layers in (2, 4))
    assert large["identity"].items() >= {"checked": "logits", "max_abs_diff": 0.0}.items()
    assert large["bytes"]["written"] > small["bytes"]["written"] + 2 * NOISE_BYTES
    assert large["peak_rss_bytes"] < small["peak_rss_bytes"] + NOISE_BYTES
