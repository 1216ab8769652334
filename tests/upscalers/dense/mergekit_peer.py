"""mergekit's passthrough merges of one tiny Llama: a checksum of what each gives, and the base to make the same again.

mergekit is no dependency of this project. In an environment of its own with mergekit, from the root of the repository:

    python tests/upscalers/dense/mergekit_peer.py

It writes `mergekit_passthrough.json` beside this file, which names the versions it was made with (mergekit 0.1.5, torch
2.13.0, transformers 5.23.0). Numbers of the base follow from a formula of integers, so that no random generator has to
stay the same from version to version.
"""

import hashlib
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

RESULTS = Path(__file__).with_name("mergekit_passthrough.json")
PACKAGES = ("mergekit", "torch", "transformers")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

NUM_LAYERS = 6
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "head_dim": 4,
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": NUM_LAYERS,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 32,
}

ZEROED = {"o_proj": 0.0, "down_proj": 0.0}
# First layer, the one after the last, and factors of the tensors whose names hold the key.
Slice = tuple[int, int, dict[str, float]]

MERGES: dict[str, list[Slice]] = {
    "overlapping slices": [(0, 5, {}), (1, 6, {})],
    "a zeroed copy after every third layer": [(0, 3, {}), (2, 3, ZEROED), (3, 6, {}), (5, 6, ZEROED)],
}


def layer_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's tensors, by their name within the layer."""
    hidden, inner, width = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    queries, keys = CONFIG["num_attention_heads"] * width, CONFIG["num_key_value_heads"] * width
    return {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def base_tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors of the base, no two alike; none is zero, and float32 holds each exactly."""
    shapes = {"model.embed_tokens.weight": (CONFIG["vocab_size"], CONFIG["hidden_size"])}
    for layer in range(NUM_LAYERS):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes().items()}
    shapes |= {"model.norm.weight": (CONFIG["hidden_size"],), "lm_head.weight": shapes["model.embed_tokens.weight"]}
    tensors = {}
    for number, (name, shape) in enumerate(shapes.items()):
        index = torch.arange(torch.Size(shape).numel())
        values = (2 * ((index * 7919 + number * 5471 + 13) % 1999) - 1999).double() / 2**14
        tensors[name] = (values + (1 if "norm" in name else 0)).to(dtype).reshape(shape)
    return tensors


def write_base(folder: Path, dtype: str) -> Path:
    """Write the base as any checkpoint is laid out."""
    folder.mkdir(parents=True)
    save_file(base_tensors(DTYPES[dtype]), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**CONFIG, "torch_dtype": dtype}), encoding="utf-8")
    return folder


def checksum(folder: Path) -> str:
    """Return a digest of the tensors of a checkpoint. A zero has no sign here: mergekit makes zeros by multiplication."""
    lines = []
    for path in folder.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            tensor = tensor + 0.0
            content = f"{tensor.dtype} {list(tensor.shape)} ".encode() + tensor.view(torch.uint8).numpy().tobytes()
            lines.append(f"{name} {hashlib.sha256(content).hexdigest()}\n")
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def merge_config(base: Path, slices: list[Slice], dtype: str) -> dict[str, Any]:
    """Return the recipe for mergekit."""

    def source(first: int, end: int, factors: dict[str, float]) -> dict[str, Any]:
        filters = [{"filter": name, "value": factor} for name, factor in factors.items()]
        scale = {"parameters": {"scale": [*filters, {"value": 1.0}]}} if factors else {}
        return {"model": str(base), "layer_range": [first, end], **scale}

    return {
        "merge_method": "passthrough",
        "dtype": dtype,
        "slices": [{"sources": [source(*each)]} for each in slices],
    }


def merged(folder: Path, base: Path, slices: list[Slice], dtype: str) -> Path:
    """Run mergekit."""
    folder.mkdir()
    (folder / "merge.yaml").write_text(json.dumps(merge_config(base, slices, dtype)), encoding="utf-8")
    command = Path(sys.executable).with_name("mergekit-yaml")
    done = subprocess.run([command, folder / "merge.yaml", folder / "out"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"mergekit failed:\n{done.stderr}")
    return folder / "out"


def main() -> None:
    """Run every merge in every dtype and write the checksums."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for dtype in DTYPES:
            base = write_base(Path(scratch, dtype, "base"), dtype)
            rows.append({"merge": None, "dtype": dtype, "num_hidden_layers": NUM_LAYERS, "sha256": checksum(base)})
            for number, (name, slices) in enumerate(MERGES.items()):
                output = merged(Path(scratch, dtype, str(number)), base, slices, dtype)
                config = json.loads((output / "config.json").read_text(encoding="utf-8"))
                layers = {"num_hidden_layers": config["num_hidden_layers"]}
                rows.append({"merge": name, "dtype": dtype, **layers, "sha256": checksum(output)})
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    lines = ",\n".join(json.dumps(row) for row in rows)
    RESULTS.write_text(f'{{"versions": {json.dumps(versions)},\n"results": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
