"""Bases on the hub that are fetched file by file: equal to downloaded ones, with one file on the disk at a time."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import hf_hub_download

from midus_hf.models.inference.tiny import tiny_model
from tests.upscalers.checkpoints import (
    file_digests,
    logits,
    read_tensors,
    record_of,
    save_base,
    tensor_files,
    with_memory,
    write_tensors,
)
from tests.upscalers.hub_server import Repository, files_of
from upscalers.checkpoint import hub_shards
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

SMALL = {"n": 8, "k": 2}


@pytest.fixture
def base(tmp_path, hub, monkeypatch) -> Path:
    """A sharded base that lies on the hub too, as org/base; temporary files go to a folder of the test."""
    folder = save_base(tmp_path / "base", max_shard_size="40KB", tie_word_embeddings=False)
    assert len(tensor_files(folder)) > 3
    hub.repositories["org/base"] = Repository(files_of(folder))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return folder


@pytest.fixture
def on_disk(tmp_path, monkeypatch) -> list[int]:
    """Bytes of weights among the temporary files whenever a file was fetched."""
    seen, fetch = [], hub_shards.HubShards._fetch

    def fetched(shards, shard):
        path = fetch(shards, shard)
        seen.append(sum(file.stat().st_size for file in (tmp_path / "temporary").rglob("*.safetensors")))
        return path

    monkeypatch.setattr(hub_shards.HubShards, "_fetch", fetched)
    return seen


def whole_downloads(hub) -> list[str]:
    """Names of the files of weights that were fetched whole, each as often as it was."""
    parts = [path for path, _, _ in hub.ranges]
    gets = [path.rpartition("/")[2] for method, path in hub.requests if method == "GET" and "/resolve/" in path]
    return sorted(
        name
        for name in set(gets)
        if name.endswith(".safetensors")
        for _ in range(gets.count(name) - parts.count(name))
    )


REQUESTS = [
    ("midus-hml", {}), ("midus-hml", {"verify": False}), ("llama-pro", {}), ("avg-deus", {}), ("solar", {}), ("moc", {}),
    ("midus-hml", {"max_shard_size": "30KB"}),
]  # fmt: skip
OPTIONS = {"midus-hml": SMALL, "moc": {"chapters": 8, "tokens": 64, "k": 2}}


@pytest.mark.parametrize(("method", "request_"), REQUESTS, ids=[f"{m}-{'-'.join(r) or 'plain'}" for m, r in REQUESTS])
def test_a_streamed_base_gives_what_a_downloaded_one_gives(base, hub, tmp_path, on_disk, method, request_):
    options = {} if method == "moc" else OPTIONS.get(method)
    wanted = {"method": method, "options": options, **request_}
    shards = {file.name: file.stat().st_size for file in tensor_files(base)}
    report = upscale(base="org/base", output=tmp_path / "streamed", stream=True, **wanted)
    assert whole_downloads(hub) == sorted(shards)  # each file once, for writing and for the comparison together
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert not list((tmp_path / "temporary").iterdir())
    neighbours = method in ("avg-deus",)  # new layers are made of two layers, which may lie in two files
    assert max(on_disk) <= (2 if neighbours else 1) * max(shards.values())
    assert report.peak_disk_bytes == report.bytes.written + max(on_disk)
    expected = upscale(base="org/base", output=tmp_path / "downloaded", **wanted)
    assert (report.identity, report.kl_divergence) == (expected.identity, expected.kl_divergence)
    made = [file_digests(tmp_path / name) for name in ("streamed", "downloaded")]
    assert made[0] == made[1]
    assert expected.peak_disk_bytes > report.peak_disk_bytes


def test_headers_are_read_by_ranges_and_no_file_before_it_is_needed(base, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_shards, "_FIRST_BYTES", 64)  # so that each header takes two requests
    upscale(base="org/base", method="midus-hml", options=SMALL, output=tmp_path / "out", stream=True, verify=False)
    for file in tensor_files(base):
        length = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        assert [part[1:] for part in hub.ranges if part[0] == file.name] == [(0, 63), (64, length - 1)]


def test_files_in_the_cache_are_used_and_stay(base, hub, tmp_path):
    name = tensor_files(base)[1].name
    cached = Path(hf_hub_download("org/base", name))
    hub.requests.clear()
    report = upscale(base="org/base", method="midus-hml", options=SMALL, output=tmp_path / "out", stream=True)
    assert report.identity.max_abs_diff == 0.0
    assert name not in whole_downloads(hub) and cached.is_file()
    assert torch.equal(logits(tmp_path / "out"), logits(base))


def test_tensors_in_alphabetical_order_are_fetched_once_too(base, hub, tmp_path, on_disk):
    tensors = read_tensors(base)
    names = sorted(tensors, reverse=True)
    files = files_of(base)
    files = {name: content for name, content in files.items() if "safetensors" not in name}
    weight_map = {}
    for number in range(4):
        held = names[number::4]  # so that each layer lies in every file
        write_tensors(tmp_path / "base", {name: tensors[name] for name in held})
        file = f"part-{number}.safetensors"
        files[file] = (tmp_path / "base" / "model.safetensors").read_bytes()
        weight_map |= dict.fromkeys(held, file)
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    hub.repositories["org/base"] = Repository(files)
    report = upscale(base="org/base", method="midus-hml", options=SMALL, output=tmp_path / "out", stream=True)
    assert report.identity.max_abs_diff == 0.0
    assert whole_downloads(hub) == sorted(set(weight_map.values()))
    assert max(on_disk) < sum(len(content) for name, content in files.items() if name.startswith("part")) / 2


def test_a_cast_base_is_fetched_again_for_the_comparison(base, hub, tmp_path, on_disk):
    report = upscale(
        base="org/base", method="midus-hml", options=SMALL, output=tmp_path / "out", stream=True, dtype="bfloat16"
    )
    assert report.identity.max_abs_diff == 0.0
    assert len(on_disk) >= 2 * len(tensor_files(base))
    assert max(on_disk) <= max(file.stat().st_size for file in tensor_files(base))


def test_solvers_keep_what_they_read(base, hub, tmp_path, on_disk):
    report = upscale(base="org/base", method="opt-deus", output=tmp_path / "out", stream=True, verify=False)
    assert whole_downloads(hub) == [file.name for file in tensor_files(base)]
    upscale(base=base, method="opt-deus", output=tmp_path / "local", verify=False)
    assert max(on_disk) == sum(file.stat().st_size for file in tensor_files(base))
    assert report.peak_disk_bytes > max(on_disk)
    made, expected = (read_tensors(tmp_path / name) for name in ("out", "local"))
    assert all(torch.equal(made[name], expected[name]) for name in expected)


REFUSED = {
    "local": (lambda hub: None, "base", "stream is on, but '.*base' is local; expected a hub id. Leave --stream out"),
    "missing shard": (
        lambda hub: hub.repositories["org/base"].files.pop("model-00002-of-00005.safetensors"),
        "org/base",
        "model.safetensors.index.json names model-00002-of-00005.safetensors, which is missing. Download or save",
    ),
    "cut": (
        lambda hub: hub.repositories["org/base"].files.update({"model-00002-of-00005.safetensors": b"cut"}),
        "org/base",
        "model-00002-of-00005.safetensors is not a sound safetensors file: it has 3 bytes",
    ),
    "pickled": (
        lambda hub: hub.repositories.update({"org/base": Repository({
            **{name: c for name, c in hub.repositories["org/base"].files.items() if "safetensors" not in name},
            "pytorch_model.bin": b"",
        })}),
        "org/base",
        "'org/base' has no model.safetensors and no .*index.json; expected safetensors to stream. Leave --stream out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_streamed_is_refused(base, hub, command, refused, case):
    mutate, name, message = REFUSED[case]
    mutate(hub)
    outcome = command("--base", name, "--method", "llama-pro", "--output", "out", "--stream")
    refused(outcome, message, None)


def test_a_type_that_transformers_converts_is_refused(hub, command, refused, tmp_path):
    tiny_model("mixtral").save_pretrained(tmp_path / "base")
    hub.repositories["org/base"] = Repository(files_of(tmp_path / "base"))
    outcome = command("--base", "org/base", "--method", "ultramem-v2", "--output", "out", "--stream")
    message = (
        "converts tensors of 'mixtral' when it loads them, .* expected a type whose layers are .* Leave --stream out"
    )
    refused(outcome, message, None)


def test_the_command_says_what_was_fetched_and_the_peak_disk(base, hub, command):
    words = ("--base", "org/base", "--method", "llama-pro", "--output", "out")
    done = command(*words, "--stream")
    assert done.status == 0, done.err
    assert "fetched 5 files of weights, 0.00 GB, of which 0.00 GB lay on the disk at once" in done.err
    assert re.search(r"peak disk 0\.\d\d MB", done.out)


def test_a_disk_without_room_for_a_file_is_refused(base, hub, command, refused, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=30_000)
    monkeypatch.setattr(hub_shards.shutil, "disk_usage", lambda folder: usage)
    outcome = command("--base", "org/base", "--method", "llama-pro", "--output", "out", "--stream")
    refused(
        outcome, "the largest shard of 'org/base' takes 0.00 GB, but .*temporary has 0.00 GB free; .* Set TMPDIR", None
    )


def test_a_connection_that_breaks_leaves_nothing(base, hub, command, tmp_path, monkeypatch):
    fetch = hub_shards.HubShards._fetch

    def breaks(shards, shard):
        if shards.num_fetches == 2:
            hub.repositories["org/base"].files.pop(shard.name)
        return fetch(shards, shard)

    monkeypatch.setattr(hub_shards.HubShards, "_fetch", breaks)
    done = command("--base", "org/base", "--method", "llama-pro", "--output", "out", "--stream")
    assert done.status == 1 and "of 'org/base' cannot be fetched (" in done.err and "Traceback" not in done.err
    assert not (tmp_path / "out").exists() and not list((tmp_path / "temporary").iterdir())


def test_a_copy_that_the_disk_changed_is_noticed(base, hub, tmp_path, monkeypatch):
    from upscalers.request.errors import VerificationError
    from upscalers.tensors import writer

    def copy_bytes(source, source_start, target, target_start, num_bytes):
        honest(source, source_start, target, target_start, num_bytes)
        writer.write_all(target, b"\x01", target_start)

    honest = writer.copy_bytes
    monkeypatch.setattr(writer, "copy_bytes", copy_bytes)
    with pytest.raises(VerificationError, match=r"the copy of .* is not what the base has; the disk may be faulty"):
        upscale(base="org/base", method="llama-pro", output=tmp_path / "out", stream=True, verify=False)
    assert not (tmp_path / "out").exists()


def test_one_file_of_weights_is_streamed_and_stripped_to_the_base(hub, tmp_path):
    base = save_base(tmp_path / "base")
    hub.repositories["org/base"] = Repository(files_of(base))
    done = with_memory("org/base", tmp_path / "out", stream=True)
    assert done.identity.max_abs_diff == 0.0
    assert record_of(tmp_path / "out")["base"]["revision"] == hub.repositories["org/base"].revision
    strip(tmp_path / "out", tmp_path / "stripped")
    assert (tmp_path / "stripped" / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()
