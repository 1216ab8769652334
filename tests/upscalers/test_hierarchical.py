"""The methods of hierarchical memories: their banks are made, counted, carried along, guarded, and have room."""

import json
import shutil

import pytest
import torch
from models.hierarchical_models import IDS, KINDS, OTHER_IDS
from tiny import prompt
from transformers import AutoModelForCausalLM

from midus_hf.cli import edit
from midus_hf.config.fetched_blocks import BANKS_FOLDER, level_file
from midus_hf.files.outputs import foreign_files
from tests.upscalers.checkpoints import file_digests, load, logits, same_tensors, save_base, unverified
from tests.upscalers.hub_server import Repository, files_of
from tests.upscalers.methods import SMALL_TREE as SMALL
from tests.upscalers.methods import trained


@pytest.mark.parametrize("kind", KINDS)
def test_a_bank_of_unwritten_blocks_is_beside_the_checkpoint_and_not_in_it(kind, tmp_path):
    base = save_base(tmp_path / "base", dtype=torch.bfloat16)
    model = load(unverified(base, tmp_path / "out", method=kind, options=SMALL))
    bank = model.banks.bank(kind)
    assert same_tensors(tmp_path / "out", base) and bank.written(1) == [] and bank.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(model(prompt(), memory_ids=OTHER_IDS).logits, logits(base))
    paths = {path.name: path for path in (tmp_path / "out" / BANKS_FOLDER / kind).iterdir()}
    assert paths.keys() == {"bank.json", "level-1.safetensors", "level-3.safetensors"}
    for level in bank.layout.levels:
        path = paths[level_file(level)]
        header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        assert path.stat().st_size == header + bank.layout.file_bytes(level, torch.bfloat16.itemsize)


@pytest.mark.parametrize(
    ("kind", "fetched"),
    [
        ("hier-ffn", 3 * 32),
        ("hier-lora-qk", (32 + 32) + (32 + 16)),  # two of four heads have keys and values
        ("hier-lora-vo", (32 + 16) + (32 + 32)),
        ("hier-lora-ffn", 3 * (32 + 48)),
        ("hier-kv", 2 * 16),
    ],
)
def test_reports_count_what_is_fetched(kind, fetched, base, command):
    words = ("--base", base, "--method", kind, "--set", "sizes=[3,0,2]", "--set", "branching=3", "--dry-run", "--json")
    counts = command(*words).json()["parameters"]
    assert counts["fetched"] == 4 * 5 * fetched and counts["bank"] == 4 * (3 * 3 + 2 * 27) * fetched


def test_the_seed_decides_what_blocks_start_as_and_a_second_memory_of_the_type_starts_otherwise(base, tmp_path):
    """Two that start alike have equal gradients for ever: the second would learn nothing that the first does not."""
    blocks = []
    for number, seed in enumerate((0, 0, 7)):
        folder = unverified(base, tmp_path / str(number), method="hier-kv", options=SMALL, seed=seed)
        blocks.append(load(folder).banks.bank("hier-kv").block(3, 5))
    assert torch.equal(blocks[0], blocks[1]) and not torch.equal(blocks[0], blocks[2])
    twice = unverified(tmp_path / "0", tmp_path / "twice", method="hier-kv", options=SMALL, dtype="bfloat16")
    first, second = (load(twice).banks.bank(name) for name in ("hier-kv", "hier-kv-2"))
    assert not torch.equal(first.block(3, 5).bfloat16(), second.block(3, 5))
    # The dtype of a bank follows the output, and banks that are carried keep theirs.
    assert (first.dtype, second.dtype) == (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def once(shared_base, tmp_path_factory):
    """Return a trained model with a bank of blocks; nobody may change it."""
    folder = tmp_path_factory.mktemp("once")
    unverified(shared_base(), folder / "new", method="hier-ffn", options=SMALL)
    return trained(folder / "new", folder / "once")


def test_a_base_whose_bank_is_not_its_own_or_another_tree_is_refused_and_nothing_is_left(
    once, command, tmp_path, refused
):
    words = ("--output", tmp_path / "out", "--no-verify")
    done = command("--base", once, "--method", "hier-kv", "--set", "branching=4", *words)
    refused(done, "expected one tree, by whose nodes a text fetches from both.")
    for damage in ("absent", "cut", "other", "flipped"):
        copy = shutil.copytree(once, tmp_path / "copy" / damage)
        folder = copy / BANKS_FOLDER / "hier-ffn"
        path, description = folder / "level-3.safetensors", folder / "bank.json"
        if damage == "absent":
            shutil.rmtree(folder)
        elif damage == "other":
            described = json.loads(description.read_text())
            described["layout"]["branching"] = 4
            description.write_text(json.dumps(described))
        else:
            path.write_bytes(path.read_bytes()[:-1] + (b"" if damage == "cut" else b"\x55"))
        for method in (("llama-pro",), ("hier-kv", *SET)):
            refused(command("--base", copy, "--method", *method, *words), str(folder), ["copy"])


SET = ("--set", "branching=3", "--set", "sizes=[1,0,0]")


def test_overwriting_deletes_banks_and_nothing_that_a_person_put_there(once, tmp_path):
    output = shutil.copytree(once, tmp_path / "out")
    assert foreign_files(output) == []
    for name in ("notes.txt", "hier-ffn/notes.txt", "hier-ffn/deeper/level-1.safetensors"):
        path = output / BANKS_FOLDER / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        assert foreign_files(output) == [f"{BANKS_FOLDER}/{name}"]
        path.unlink()


def test_a_base_on_the_hub_has_its_bank(hub, once, command, tmp_path):
    hub.repositories["org/base"] = Repository(files=files_of(once))
    done = command("--base", "org/base", "--method", "llama-pro", "--output", tmp_path / "out")
    assert done.status == 0, done.err
    expected = logits(once, memory_ids=IDS)
    assert torch.equal(logits(tmp_path / "out", memory_ids=IDS), expected)
    assert command("inspect", "org/base").status == 0
    hub.repositories["org/model"] = Repository(files=files_of(tmp_path / "out"))
    done = command("strip", "org/model", "--output", tmp_path / "stripped")
    assert done.status == 0, done.err
    assert torch.equal(logits(tmp_path / "stripped", memory_ids=IDS), expected)
    loaded = AutoModelForCausalLM.from_pretrained("org/base").eval()
    with torch.no_grad():
        assert torch.equal(loaded(prompt(), memory_ids=IDS).logits, expected)


def test_banks_that_are_carried_count_for_the_room_that_is_needed(base, command, tmp_path, monkeypatch):
    unverified(base, tmp_path / "new", method="hier-ffn", options={"sizes": [1024]})
    once = trained(tmp_path / "new", tmp_path / "once")
    unverified(once, tmp_path / "twice", method="llama-pro", options={})
    requests = (
        ("out", 64_000_000, ("--base", once, "--method", "llama-pro", "--no-verify")),
        ("stripped", 0, ("strip", tmp_path / "twice")),
    )
    for name, spare, words in requests:
        for free, status in ((spare + 1_000_000, 2), (spare + 40_000_000, 0)):
            usage = shutil._ntuple_diskusage(10**9, 10**9 - free, free)
            monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
            done = command(*words, "--output", tmp_path / name)
            assert done.status == status, done.err
            assert status == 0 or "GB free. Make room or" in done.err


def test_editing_chapters_carries_banks_along(once, in_process, tmp_path):
    unverified(once, tmp_path / "twice", method="moc", options={})
    words = ("prune", tmp_path / "twice", "--chapters", "1", "--output", tmp_path / "edited")
    done = in_process(edit.main, *words)
    assert done.status == 0, done.err
    banks = [file_digests(folder / BANKS_FOLDER) for folder in (tmp_path / "edited", once)]
    assert banks[0] == banks[1] != {}
    assert torch.equal(logits(tmp_path / "edited", memory_ids=IDS), logits(once, memory_ids=IDS))


def test_a_bank_that_would_outgrow_the_disk_as_it_trains_is_told(base, command, tmp_path, monkeypatch):
    free = 70_000_000
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - free, free))
    words = ("--base", base, "--method", "hier-ffn", "--no-verify", "--output")
    done = command(*words, tmp_path / "large", "--set", "sizes=[4096]")
    message = (
        f"the bank of hier-ffn takes 0.11 GB once all of its blocks are trained, but {tmp_path} has 0.07 GB free;"
    )
    assert done.status == 0 and f"upscale: warning: {message}" in done.err
    assert command(*words, tmp_path / "small", "--set", "sizes=[64]").err == ""
