"""Hundreds of damaged checkpoints: each ends in a clear refusal, or in a result that computes what its base computes."""

import contextlib
import json
import random
import re
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import prompt

from tests.upscalers.checkpoints import load, save_base
from upscalers.request.errors import RequestError, VerificationError
from upscalers.runs.upscale import upscale

# Damages a checkpoint folder; says what it did.
Mutation = Callable[[Path, random.Random], str]

VALUES = [
    None, True, False, 0, 1, 2, 3, -1, 7, 2**31, 2**70, -(2**70), 0.5, -1.5, 1e300, float("nan"), float("inf"),
    "", "x", "4", "x" * 5000, "\ud800", [], [1], ["x"], [None], [1, 2, 3, 4], {}, {"x": 1}, {"rope_type": "x"},
    "F16", "I32", "F8_E4M3", "../x.safetensors", "x.bin",
]  # fmt: skip
ADDED_KEYS = [
    "layer_types", "memory", "upscale", "auto_map", "quantization_config", "num_experts", "num_local_experts",
    "text_config", "sliding_window_pattern", "mlp_only_layers", "no_rope_layers", "num_kv_shared_layers",
    "rope_scaling", "torch_dtype", "partial_rotary_factor", "pretraining_tp", "is_decoder", "pruned_heads",
    "model.layers.99.x", "model.layers.00.self_attn.q_proj.weight",
]  # fmt: skip
TEXTS = ["", "{", "[]", "null", "1" * 5000, '{"a":' * 5000, "\x00", '{"model_type": "llama"}', "NaN"]


def one_mutation(folder: Path, seed: int) -> str:
    """Damage a folder in a way that depends on the seed alone."""
    rng = random.Random(seed)
    return rng.choice(MUTATIONS)(folder, rng)


def kind_of(seed: int) -> str:
    """What `one_mutation` does with this seed."""
    return random.Random(seed).choice(MUTATIONS).__name__


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place inside nested lists and dictionaries."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in ((*path, key), *places_in(inner, (*path, key)))]


def edited(document: Any, path: tuple[Any, ...], edit: Callable[[Any, Any], None]) -> Any:
    """Return a copy of a document in which the parent of a place was edited."""
    document = inner = json.loads(json.dumps(document))
    for key in path[:-1]:
        inner = inner[key]
    edit(inner, path[-1])
    return document


def _edited(document: Any, rng: random.Random) -> tuple[Any, str]:
    """Set, remove, rename or add something anywhere in a document of JSON, or replace all of it."""
    path = rng.choice(places_in(document))
    value, name = rng.choice(VALUES), rng.choice(ADDED_KEYS)
    edits: dict[str, Callable[[Any, Any], Any]] = {
        f"{path} = {value!r:.40}": lambda inner, key: inner.__setitem__(key, value),
        f"{path} doubled": lambda inner, key: inner.__setitem__(
            key, 2 * inner[key] if isinstance(inner[key], int) else value
        ),
        f"{path} removed": lambda inner, key: inner.__delitem__(key),
        f"{path[:-1]} has {name} = {value!r:.40}": lambda inner, key: inner.__setitem__(
            name if isinstance(inner, dict) else key, value
        ),
    }
    done = rng.choice([*edits, *edits, "replaced"])
    return (value, f"all is {value!r:.40}") if done == "replaced" else (edited(document, path, edits[done]), done)


def damage_the_bytes(folder: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(folder.glob("*.safetensors")))
    content = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    place, size = rng.randrange(8 + length, len(content) - 1024), rng.choice([2, 4, 64, 1024])
    done = rng.choice(["bit flipped", "bit flipped in the header", "overwritten", "another length of the header"])
    if done.startswith("bit flipped"):
        place = rng.randrange(8 + length) if done.endswith("header") else place
        content[place] ^= 1 << rng.randrange(8)
    elif done == "overwritten":
        content[place : place + size] = rng.choice([b"\x00", b"\xff", b"\x7f", rng.randbytes(1)]) * size
    else:
        content[:8] = struct.pack("<Q", rng.choice([0, 1, 2, 8, len(content), 2**31, 2**62, 2**64 - 1]))
    path.write_bytes(content)
    return f"{path.name}: {done} at {place}"


def damage_a_file(folder: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(file for file in folder.iterdir() if file.is_file()))
    content = path.read_bytes()
    done = rng.choice(["cut", "longer", "noise", "deleted", "a folder"])
    path.unlink()
    if done == "a folder":
        path.mkdir()
    elif done == "cut":
        path.write_bytes(content[: rng.choice([0, 1, 7, 8, len(content) - 1, rng.randrange(len(content))])])
    elif done != "deleted":
        path.write_bytes((content if done == "longer" else b"") + rng.randbytes(rng.choice([3, 8, 1000])))
    return f"{path.name} is {done}"


def edit_a_header(folder: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(folder.glob("*.safetensors")))
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, done = _edited(json.loads(content[8 : 8 + length]), rng)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + content[8 + length :])
    return f"{path.name}: {done}"


def edit_a_document(folder: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(folder.glob("*.json")))
    document, done = _edited(json.loads(path.read_text()), rng)
    path.write_text(json.dumps(document))
    return f"{path.name}: {done}"


def edit_the_config(folder: Path, rng: random.Random) -> str:
    path = folder / "config.json"
    config, done = _edited(json.loads(path.read_text()), rng)
    path.write_text(json.dumps(config))
    return f"{path.name}: {done}"


def replace_the_config(folder: Path, rng: random.Random) -> str:
    text = rng.choice(TEXTS)
    (folder / "config.json").write_text(text)
    return f"config is {text!r:.40}"


MUTATIONS: list[Mutation] = [
    damage_the_bytes,
    damage_a_file,
    edit_a_header,
    edit_a_document,
    edit_the_config,
    edit_the_config,
    edit_the_config,
    replace_the_config,
]


CASES, PARTS, SECONDS = 200, 4, 60
NUM_BASES = 3
# By default, how often each kind of damage is done to each base.
EACH = 2
# Damage after which weights may be NaN, infinite or huge, so that the check of blocks alone must refuse.
WITHOUT_NUMBERS = "rms_norm_eps|overwritten|bit flipped"


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail what takes longer."""

    def give_up(*_):
        raise TimeoutError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A single-file and two sharded bases of different families."""
    folder = tmp_path_factory.mktemp("sound")
    sound = [
        save_base(folder / "llama", "llama", max_shard_size="60KB", num_hidden_layers=2),
        save_base(folder / "gemma3", "gemma3", num_hidden_layers=2),
        save_base(folder / "qwen2", "qwen2", torch.bfloat16, max_shard_size="30KB", num_hidden_layers=2),
    ]
    assert len(sound) == NUM_BASES
    return sound


def computed(folder) -> torch.Tensor:
    """Logits of the prompt, by transformers alone."""
    with torch.no_grad():
        return load(folder)(prompt()).logits


def telling(seeds: range) -> list[int]:
    """The first of these, as many as `EACH`, for each kind of damage to each base."""
    seeds_of: dict[tuple[int, str], list[int]] = {}
    for seed in seeds:
        seeds_of.setdefault((seed % NUM_BASES, kind_of(seed)), []).append(seed)
    return sorted(seed for of_kind in seeds_of.values() for seed in of_kind[:EACH])


def damaged(bases, seed, folder):
    """A damaged copy of one of the bases, and what was done to it."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(bases[seed % len(bases)], folder)
    return one_mutation(folder, seed)


@pytest.fixture
def all_of_it(request) -> bool:
    """Whether every damage is done; by default each kind that its range has is done once to each base."""
    return request.config.getoption("--product")


@pytest.mark.parametrize("part", range(PARTS))
def test_damage_ends_in_a_refusal_or_in_a_result_equal_to_the_base(bases, tmp_path, part, all_of_it):
    base, output = tmp_path / "base", tmp_path / "out"
    refused = identical = 0
    for seed in range(part, CASES, PARTS) if all_of_it else telling(range(CASES))[part::PARTS]:
        for verify in (True, False):
            damage = damaged(bases, seed, base)
            request = {"method": "midus-hml", "options": {"n": 4, "k": 2}, "num_new_layers": 1, "verify": verify}
            try:
                with within(SECONDS):
                    upscale(base=base, output=output, placement="bottom-heavy", **request)
            except RequestError as error:
                assert str(error), damage
                assert len(str(error)) < 6000, damage
                refused += 1
            except VerificationError as error:
                assert not verify, (damage, error)
                assert "gives NaN" in str(error), (damage, error)
                assert re.search(WITHOUT_NUMBERS, damage), (damage, error)
                refused += 1
            else:
                try:
                    expected = computed(base)
                except Exception:
                    expected = None  # transformers cannot run this base at all, so there is nothing to be equal to
                if expected is not None:
                    given = computed(output)
                    assert ((expected == given) | (expected.isnan() & given.isnan())).all(), damage
                identical += 1
                shutil.rmtree(output)
            assert [path.name for path in tmp_path.iterdir()] == ["base"], damage
    assert refused > 5
    assert identical > 0
