"""Bases whose weights torch saved: read by position, equal to the same base in safetensors, and never unpickled."""

import json
import os
import random
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from pairs import in_turn
from torch import nn

from tests.upscalers.checkpoints import logits, read_tensors, same_bits, save_base, with_memory
from tests.upscalers.hub_server import Repository, files_of
from upscalers.checkpoint.base_model import open_base
from upscalers.checkpoint.computed_tensor import read_tensor
from upscalers.checkpoint.pickled_weights import read_pickled
from upscalers.edits.checkpoint_edit import edited_shards
from upscalers.request.errors import RequestError
from upscalers.runs.strip import strip
from upscalers.tensors.writer import CheckpointWriter

LEGACY = {"_use_new_zipfile_serialization": False}  # how torch.save wrote before PyTorch 1.6


def pickle_weights(folder: Path, num_shards: int = 1) -> dict[str, torch.Tensor]:
    """Put pickled weights in place of a base's safetensors, and return them."""
    tensors = read_tensors(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    names = sorted(tensors)
    shards = {
        f"pytorch_model-{number + 1:05d}-of-{num_shards:05d}.bin": names[number::num_shards]
        for number in range(num_shards)
    }
    if num_shards == 1:
        shards = {"pytorch_model.bin": names}
    else:
        weight_map = {name: file for file, held in shards.items() for name in held}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for file, held in shards.items():
        torch.save(OrderedDict((name, tensors[name]) for name in held), folder / file)
    return tensors


@pytest.mark.parametrize(("num_shards", "dtype"), in_turn([1, 3], [torch.float32, torch.bfloat16]))
def test_a_pickled_base_gives_what_its_safetensors_give(tmp_path, num_shards, dtype):
    base = save_base(tmp_path / "base", dtype=dtype)
    with_memory(base, tmp_path / "expected")
    before = logits(base)
    weights = pickle_weights(base, num_shards)
    report = with_memory(base, tmp_path / "out")
    assert (report.identity.checked, report.identity.max_abs_diff) == ("logits", 0.0)
    assert torch.equal(logits(tmp_path / "out"), before)
    expected, made = read_tensors(tmp_path / "expected"), read_tensors(tmp_path / "out")
    assert expected.keys() == made.keys() and all(same_bits(expected[name], made[name]) for name in expected)
    assert not list((tmp_path / "out").rglob("*.bin*"))
    strip(tmp_path / "out", tmp_path / "stripped")
    stripped = read_tensors(tmp_path / "stripped")
    assert all(same_bits(stripped[name], tensor) for name, tensor in weights.items())


def test_every_kind_of_tensor_is_read_as_torch_reads_it(tmp_path):
    table, draw = torch.arange(24.0).view(6, 4), torch.Generator().manual_seed(0)
    saved = {
        "parameter": nn.Parameter(torch.randn(3, 5, generator=draw)),
        "rows": table[2:5],
        "again": table,
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "one_column": table[:, 1:2][:1],
        "half": torch.randn(7, generator=draw).half(),
        "bfloat16": torch.randn(7, generator=draw).bfloat16(),
        "double": torch.randn(2, 2, generator=draw).double(),
        **{str(kind): torch.arange(5).to(kind) for kind in (torch.int8, torch.uint8, torch.int64)},
        "float8": torch.randn(4, generator=draw).to(torch.float8_e4m3fn),
    }
    state = nn.Linear(2, 3).state_dict()  # which has metadata beside its tensors
    state.update(saved)
    torch.save(state, tmp_path / "weights.bin")
    read = read_pickled(tmp_path / "weights.bin")
    expected = torch.load(tmp_path / "weights.bin", weights_only=True)
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor.dtype in (torch.float8_e4m3fn, torch.int64):
            stored = read[name]
            assert stored.dtype == ("I64" if name == "torch.int64" else "F8_E4M3")
            content = (tmp_path / "weights.bin").read_bytes()[stored.start : stored.start + stored.num_bytes]
            assert content == tensor.view(torch.uint8).numpy().tobytes()
        else:
            assert same_bits(read_tensor(read[name]), tensor.detach()), name
    assert read["rows"].start == read["again"].start + 2 * 16


@pytest.mark.parametrize("num_shards", [1, 2])
def test_numbers_and_texts_beside_tensors_are_left_out_as_transformers_does_and_said(tmp_path, command, num_shards):
    base = save_base(tmp_path / "base")
    before = logits(base)
    pickle_weights(base, num_shards)
    file = sorted(base.glob("pytorch_model*.bin"))[-1]
    torch.save({**torch.load(file), "step": 3, "note": "text"}, file)
    done = command(
        "--base", base, "--method", "midus-hml", "--output", tmp_path / "out", "--set", "n=8", "--set", "k=2"
    )
    assert done.status == 0 and torch.equal(logits(base), before) and torch.equal(logits(tmp_path / "out"), before)
    assert (
        "warning: the base holds step, note beside its tensors; no model reads that, and it is left out." in done.err
    )


class Payload:
    """An object whose pickle runs a command when it is loaded."""

    def __init__(self, command: str):
        self._command = command

    def __reduce__(self):
        return os.system, (self._command,)


@pytest.mark.parametrize("hidden_in", ["value", "name", "metadata"])
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path, command, refused, hidden_in):
    base = save_base(tmp_path / "base")
    state = OrderedDict(pickle_weights(base))
    payload = Payload(f"touch {tmp_path / 'has_run'}")
    if hidden_in == "metadata":
        state._metadata = payload
    else:
        state |= {"extra": payload} if hidden_in == "value" else {payload: torch.zeros(1)}
    torch.save(state, base / "pytorch_model.bin")
    outcome = command("--base", base, "--method", "midus-hml", "--output", tmp_path / "out")
    message = (
        r"pytorch_model.bin asks for posix.system when it is unpickled, which is never run; expected tensors alone. "
        "Do not load the file by other means; give a checkpoint in safetensors"
    )
    refused(outcome, message, ["base"])  # so the folder has no file `has_run`
    torch.load(base / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "has_run").exists()  # the payload is real


def overlong(folder: Path) -> None:
    """Describe a tensor that is larger than its storage."""
    file = folder / "pytorch_model.bin"
    torch.save({"x": torch.zeros(300, 7)}, file)
    content = file.read_bytes()
    assert content.count(b"M,\x01K\x07\x86") == 1
    file.write_bytes(content.replace(b"M,\x01K\x07\x86", b"M,\x02K\x07\x86"))


def compressed(folder: Path) -> None:
    file = folder / "pytorch_model.bin"
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


UNSOUND = {
    "no weights": (lambda folder: torch.save([1, 2], folder / "pytorch_model.bin"), "it holds a list instead of tensors by name"),
    "no tensor": (
        lambda folder: torch.save({"step": 3}, folder / "pytorch_model.bin"), "'step' is an int instead of a tensor"
    ),
    "tensors one level down": (
        lambda folder: torch.save({"step": 3, "model": {"x": torch.zeros(1)}}, folder / "pytorch_model.bin"),
        "'model' is a dict instead of a tensor",
    ),
    "text": (lambda folder: (folder / "pytorch_model.bin").write_text("text"), "is not a sound file of PyTorch weights"),
    "cut": (
        lambda folder: (folder / "pytorch_model.bin").write_bytes((folder / "pytorch_model.bin").read_bytes()[:-300]),
        "pytorch_model.bin is not a sound file of PyTorch weights: .* Download or save it again",
    ),
    "overlong": (overlong, "'x' reaches beyond its storage"),
    "compressed": (compressed, "pytorch_model.bin is not a sound file of PyTorch weights"),
    "legacy": (
        lambda folder: torch.save({"x": torch.zeros(1)}, folder / "pytorch_model.bin", **LEGACY),
        "it is no archive, as torch.save has written since PyTorch 1.6. Download or save it again",
    ),
    "strides": (
        lambda folder: torch.save({"model.norm.weight": torch.zeros(4, 8).T}, folder / "pytorch_model.bin"),
        r"model.norm.weight is stored in pytorch_model.bin with strides \[1, 8\]; expected its elements one after another. Load",
    ),
    "other file": (
        lambda folder: (folder / "pytorch_model.bin").rename(folder / "model.pt"),
        "holds model.pt; expected model.safetensors, pytorch_model.bin or an index of shards, .* Give a checkpoint that",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNSOUND)
def test_what_is_no_file_of_weights_is_refused(tmp_path, command, refused, case):
    base = save_base(tmp_path / "base")
    pickle_weights(base)
    mutate, message = UNSOUND[case]
    mutate(base)
    refused(command("--base", base, "--method", "midus-hml", "--output", tmp_path / "out"), message, ["base"])


def test_any_damage_is_an_error_in_one_line_or_changes_no_position(tmp_path):
    whole, file = tmp_path / "whole.bin", tmp_path / "damaged.bin"
    torch.save({"a": torch.randn(3, 4), "b": torch.randn(5)}, whole)
    content, draw = whole.read_bytes(), random.Random(0)
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(draw.randrange(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        file.write_bytes(damaged[: draw.choice([len(damaged), draw.randrange(len(damaged))])])
        try:
            read = read_pickled(file)
        except RequestError as error:
            assert "\n" not in str(error)
        else:
            assert all(0 <= each.start <= each.start + each.num_bytes <= len(damaged) for each in read.values())


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_repository_with_pickled_weights_alone_is_downloaded(tmp_path, hub, command, num_shards):
    base = save_base(tmp_path / "base")
    before = logits(base)
    pickle_weights(base, num_shards)
    (base / "optimizer.bin").write_bytes(b"not of the model")
    hub.repositories["org/base"] = Repository(files_of(base))
    done = command("--base", "org/base", "--method", "midus-hml", "--output", "out", "--set", "n=8", "--set", "k=2")
    assert done.status == 0, done.err
    assert torch.equal(logits(tmp_path / "out"), before)
    assert hub.downloaded("org/base") == files_of(base).keys() - {"optimizer.bin"}


def test_an_edit_of_a_pickled_checkpoint_writes_safetensors(tmp_path):
    base = save_base(tmp_path / "base")
    for num_shards, files in (
        (1, ["model.safetensors"]),
        (2, [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]),
    ):
        pickle_weights(base, num_shards)
        shards = edited_shards(open_base(base), {})
        assert list(shards) == files
        CheckpointWriter(open_base(base).tensors, scan=False).write(base, shards)
        for file in base.glob("pytorch_model*"):
            file.unlink()
        assert same_bits(logits(base), logits(save_base(tmp_path / "again")))
