"""Damaged checkpoints are refused, or upscaled to what their base computes."""

import itertools
import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import by_default

from tests.upscalers.checkpoints import edit_config, save_base, unverified
from tests.upscalers.contents import config_of, logits, same_tensors
from upscalers.request import VerificationError
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

VALUES = [
    None, True, 0, 3, -1, 2**31, 2**70, 0.5, 1e300, float("nan"), float("inf"), "", "x", "4", "x" * 5000, "\ud800", [], [1], ["x"],
    [None], [1, 2, 3, 4], {}, {"x": 1}, {"rope_type": "x"}, "F16", "I32", "F8_E4M3", "../x.safetensors", "x.bin",
]  # fmt: skip
ADDED_KEYS = [
    "layer_types", "memory", "upscale", "auto_map", "quantization_config", "num_experts", "text_config", "sliding_window_pattern",
    "mlp_only_layers", "no_rope_layers", "num_kv_shared_layers", "rope_scaling", "torch_dtype", "partial_rotary_factor", "is_decoder",
    "pruned_heads", "model.layers.99.x", "model.layers.00.self_attn.q_proj.weight",
]  # fmt: skip


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [inner for key, each in items for inner in ((*path, key), *paths_in(each, (*path, key)))]


def changed(document: Any, path: tuple[Any, ...], key: Any, value: Any) -> Any:
    document = parent = json.loads(json.dumps(document))
    for each in path[:-1]:
        parent = parent[each]
    if value is ...:
        del parent[key]
    else:
        parent[key] = value
    return document


def edit(document: Any, rng: random.Random) -> tuple[Any, str]:
    """Set, remove or add something anywhere in a document, or replace all of it; and what was done."""
    path, value = rng.choice(paths_in(document)), rng.choice([*VALUES, ..., ...])
    added = isinstance(path[-1], str) and rng.random() < 0.2
    key = rng.choice(ADDED_KEYS) if added else path[-1]
    value = 1 if added and value is ... else value
    if rng.random() < 0.05:
        return None if value is ... else value, f"all is {value!r:.40}"
    return changed(document, path, key, value), f"{path[:-1]} has {key} = {value!r:.40}"


def edit_json(folder: Path, rng: random.Random) -> str:
    pattern = rng.choice(["config.json", "*.json", "*.safetensors"])
    path = rng.choice(sorted(folder.glob(pattern)))
    if path.suffix == ".safetensors":
        content = path.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header, done = edit(json.loads(content[8:end]), rng)
        encoded = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + content[end:])
    else:
        document, done = edit(json.loads(path.read_bytes()), rng)
        path.write_text(json.dumps(document))
    return f"{path.name}: {done}"


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder, layers = tmp_path_factory.mktemp("sound"), {"num_hidden_layers": 2}
    return [
        save_base(folder / "llama", "llama", max_shard_size="60KB", **layers),
        save_base(folder / "gemma3", "gemma3", **layers),
        save_base(folder / "qwen2", "qwen2", torch.bfloat16, max_shard_size="30KB", **layers),
    ]


@pytest.mark.parametrize("seed", by_default(range(1), range(30)))
def test_damaged_base_is_refused_or_equalled(bases, tmp_path, seed):
    base, output = tmp_path / "base", tmp_path / "out"
    request = {"method": "midus-hml", "options": {"n": 4, "k": 2}, "num_new_layers": 1, "placement": "bottom-heavy"}
    for number, verify in itertools.product(range(len(bases)), (True, False)):
        shutil.rmtree(base, ignore_errors=True)
        shutil.copytree(bases[number], base)
        done = edit_json(base, random.Random(f"edit_json {seed} {number}"))
        try:
            upscale(base=base, output=output, verify=verify, **request)
        except ValueError as error:
            assert 0 < len(str(error)) < 6000, done
        except VerificationError:
            assert verify, done
            assert "rms_norm_eps" in done, done  # which may make weights NaN, or huge
        else:
            try:
                expected = logits(base)
            except Exception:
                expected = None  # transformers cannot run this base at all, so there is nothing to be equal to
            if expected is not None:
                computed = logits(output)
                assert ((expected == computed) | (expected.isnan() & computed.isnan())).all(), done
            shutil.rmtree(output)
        assert [path.name for path in tmp_path.iterdir()] == ["base"], done


@pytest.mark.parametrize("cases", by_default([30], [30, 200]))
def test_damaged_record_strips_or_is_refused(tmp_path, cases):
    base = save_base(tmp_path / "base", num_hidden_layers=2)
    model = unverified(base, tmp_path / "out")
    entry = config_of(model)["upscale"]
    damaged = [path for path in paths_in(entry) if path[0] != "base_config" or path[-1] == "num_hidden_layers"]
    for path, value in random.Random(0).sample(list(itertools.product(damaged, VALUES)), cases):
        edit_config(model, upscale=changed(entry, path, path[-1], value))
        try:
            strip(model, tmp_path / "stripped", overwrite=True)
        except ValueError:
            continue
        assert same_tensors(tmp_path / "stripped", base), (path, value)
