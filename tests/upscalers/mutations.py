"""Checkpoints gone wrong: deterministic, random damage to the files of a sound one."""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.upscalers.checkpoints import config_of

# Damages a checkpoint folder; says what it did.
Mutation = Callable[[Path, random.Random], str]

VALUES = [
    None, True, False, 0, 1, 2, 3, -1, 7, 2**31, 2**70, -(2**70), 0.5, -1.5, 1e300, float("nan"), float("inf"),
    "", "x", "4", "x" * 5000, "\ud800", [], [1], ["x"], [None], [1, 2, 3, 4], {}, {"x": 1}, {"rope_type": "x"},
]  # fmt: skip
ADDED_KEYS = [
    "layer_types", "memory", "upscale", "auto_map", "quantization_config", "num_experts", "num_local_experts",
    "text_config", "sliding_window_pattern", "mlp_only_layers", "no_rope_layers", "num_kv_shared_layers",
    "rope_scaling", "torch_dtype", "partial_rotary_factor", "pretraining_tp", "is_decoder", "pruned_heads",
]  # fmt: skip


def one_mutation(folder: Path, seed: int) -> str:
    """Damage a folder in a way that depends on the seed alone."""
    rng = random.Random(seed)
    return rng.choice(MUTATIONS)(folder, rng)


def kind_of(seed: int) -> str:
    """What `one_mutation` does with this seed."""
    return random.Random(seed).choice(MUTATIONS).__name__


def _weights(folder: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(folder.glob("*.safetensors")))


def _header(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _write_header(path: Path, header: Any, data: bytes) -> None:
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def flip_a_bit_anywhere(folder: Path, rng: random.Random) -> str:
    path = _weights(folder, rng)
    content = bytearray(path.read_bytes())
    place = rng.randrange(len(content))
    content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return f"bit flipped at {place} of {path.name}"


def flip_bits_of_the_header(folder: Path, rng: random.Random) -> str:
    path = _weights(folder, rng)
    content = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    places = [rng.randrange(8 + length) for _ in range(rng.randint(1, 3))]
    for place in places:
        content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return f"bits flipped at {places} of {path.name}"


def overwrite_values(folder: Path, rng: random.Random) -> str:
    path = _weights(folder, rng)
    content = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    size = rng.choice([2, 4, 64, 1024])
    place = rng.randrange(8 + length, len(content) - size)
    content[place : place + size] = rng.choice([b"\x00", b"\xff", b"\x7f", rng.randbytes(1)]) * size
    path.write_bytes(content)
    return f"{size} bytes overwritten at {place} of {path.name}"


def truncate(folder: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(file for file in folder.iterdir() if file.is_file()))
    content = path.read_bytes()
    length = rng.choice([0, 1, 7, 8, len(content) - 1, rng.randrange(len(content))])
    path.write_bytes(content[:length])
    return f"{path.name} cut to {length} of {len(content)} bytes"


def append(folder: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(file for file in folder.iterdir() if file.is_file()))
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.choice([1, 8, 1000])))
    return f"bytes appended to {path.name}"


def fill_with_noise(folder: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(file for file in folder.iterdir() if file.is_file()))
    path.write_bytes(rng.randbytes(rng.choice([3, 8, 100, 5000])))
    return f"{path.name} is noise"


def delete(folder: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(file for file in folder.iterdir() if file.is_file()))
    path.unlink()
    return f"{path.name} deleted"


def put_a_folder_in_its_place(folder: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(file for file in folder.iterdir() if file.is_file()))
    path.unlink()
    path.mkdir()
    return f"{path.name} is a folder"


def edit_the_header(folder: Path, rng: random.Random) -> str:
    path = _weights(folder, rng)
    header, data = _header(path)
    name = rng.choice(sorted(set(header) - {"__metadata__"}))
    match rng.randrange(7):
        case 0:
            header[name] = value = rng.choice(VALUES)
            done = f"entry = {value!r:.40}"
        case 1:
            key = rng.choice(["dtype", "shape", "data_offsets"])
            header[name][key] = value = rng.choice(VALUES)
            done = f"{key} = {value!r:.40}"
        case 2:
            key = rng.choice(["dtype", "shape", "data_offsets"])
            del header[name][key]
            done = f"{key} removed"
        case 3:
            header[name]["dtype"] = value = rng.choice(
                ["F16", "BF16", "I32", "F32", "F64", "F8_E4M3", "F4", "f32", "BOOL"]
            )
            done = f"dtype = {value}"
        case 4:
            header[name]["shape"] = value = rng.choice([header[name]["shape"][::-1], [*header[name]["shape"], 1], [0]])
            done = f"shape = {value}"
        case 5:
            other = rng.choice(sorted(set(header) - {"__metadata__"}))
            header[name], header[other] = header[other], header[name]
            done = f"swapped with {other}"
        case _:
            new = rng.choice(
                ["", "x", name + "x", name.replace("0", "00"), name.replace("0", "99"), name.removeprefix("model.")]
            )
            header[new] = header.pop(name)
            done = f"renamed to {new!r}"
    _write_header(path, header, data)
    return f"{name} of {path.name}: {done}"


def add_a_tensor(folder: Path, rng: random.Random) -> str:
    path = _weights(folder, rng)
    header, data = _header(path)
    name = rng.choice(
        [
            "extra",
            "lm_head.weight",
            "model.layers.99.x",
            "model.layers.0.extra",
            "model.layers.00.self_attn.q_proj.weight",
        ]
    )
    if name not in header:
        header[name] = {"dtype": "F32", "shape": [32, 32], "data_offsets": [len(data), len(data) + 4096]}
        data += rng.randbytes(4096)
    _write_header(path, header, data)
    return f"{name} added to {path.name}"


def replace_the_header(folder: Path, rng: random.Random) -> str:
    path = _weights(folder, rng)
    header = rng.choice(VALUES)
    _write_header(path, header, _header(path)[1])
    return f"header of {path.name} is {header!r:.40}"


def claim_another_header_length(folder: Path, rng: random.Random) -> str:
    path = _weights(folder, rng)
    content = path.read_bytes()
    length = rng.choice([0, 1, 2, 8, len(content), 2**31, 2**62, 2**64 - 1, rng.randrange(len(content))])
    path.write_bytes(struct.pack("<Q", length) + content[8:])
    return f"header of {path.name} claims {length} bytes"


def edit_the_index(folder: Path, rng: random.Random) -> str:
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        return change_the_config(folder, rng)
    index = json.loads(path.read_text())
    name = rng.choice(sorted(index["weight_map"]))
    match rng.randrange(5):
        case 0:
            del index["weight_map"][name]
            done = f"{name} removed"
        case 1:
            file = rng.choice(
                [*sorted(set(index["weight_map"].values())), "../x.safetensors", "", "x.bin", "\ud800.safetensors"]
            )
            index["weight_map"][name] = file
            done = f"{name} in {file!r}"
        case 2:
            index["weight_map"][name] = value = rng.choice(VALUES)
            done = f"{name} in {value!r:.40}"
        case 3:
            index["weight_map"] = value = rng.choice(VALUES)
            done = f"weight_map = {value!r:.40}"
        case _:
            index = value = rng.choice(VALUES)
            done = f"index = {value!r:.40}"
    path.write_text(json.dumps(index))
    return f"{path.name}: {done}"


def change_the_config(folder: Path, rng: random.Random) -> str:
    config = config_of(folder)
    key, value = rng.choice(sorted(config)), rng.choice(VALUES)
    config[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    return f"config: {key} = {value!r:.40}"


def nudge_a_number_of_the_config(folder: Path, rng: random.Random) -> str:
    config = config_of(folder)
    key = rng.choice(sorted(key for key, value in config.items() if type(value) in (int, float)))
    config[key] = value = rng.choice(
        [-config[key], 2 * config[key], config[key] + 1, config[key] - 1, str(config[key])]
    )
    (folder / "config.json").write_text(json.dumps(config))
    return f"config: {key} = {value!r:.40}"


def remove_from_the_config(folder: Path, rng: random.Random) -> str:
    config = config_of(folder)
    keys = rng.sample(sorted(config), rng.randint(1, 3))
    for key in keys:
        del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    return f"config: without {', '.join(keys)}"


def add_to_the_config(folder: Path, rng: random.Random) -> str:
    config = config_of(folder)
    key, value = rng.choice(ADDED_KEYS), rng.choice(VALUES)
    config[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    return f"config: {key} = {value!r:.40} added"


def replace_the_config(folder: Path, rng: random.Random) -> str:
    text = rng.choice(["", "{", "[]", "null", "1" * 5000, '{"a":' * 5000, "\x00", '{"model_type": "llama"}', "NaN"])
    (folder / "config.json").write_text(text)
    return f"config is {text!r:.40}"


MUTATIONS: list[Mutation] = [
    flip_a_bit_anywhere,
    flip_bits_of_the_header,
    overwrite_values,
    truncate,
    append,
    fill_with_noise,
    delete,
    put_a_folder_in_its_place,
    edit_the_header,
    edit_the_header,
    add_a_tensor,
    replace_the_header,
    claim_another_header_length,
    edit_the_index,
    edit_the_index,
    change_the_config,
    change_the_config,
    change_the_config,
    nudge_a_number_of_the_config,
    remove_from_the_config,
    add_to_the_config,
    add_to_the_config,
    replace_the_config,
]
