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
from tests.upscalers.checkpoints import file_digests, load, logits, record_of, same_tensors, save_base
from tests.upscalers.hub_server import Repository, files_of
from tests.upscalers.methods import SMALL_TREE as SMALL
from tests.upscalers.methods import trained
from upscalers.runs.upscale import upscale


@pytest.mark.parametrize("kind", KINDS)
def test_a_bank_of_unwritten_blocks_is_beside_the_checkpoint_and_not_in_it(kind, tmp_path):
    base = save_base(tmp_path / "base", dtype=torch.bfloat16)
    upscale(base=base, method=kind, output=tmp_path / "out", options=SMALL, verify=False)
    model = load(tmp_path / "out")
    bank = model.banks.bank(kind)
    assert same_tensors(tmp_path / "out", base) and bank.written(1) == [] and bank.dtype == torch.bfloat16
    for ids in (None, IDS, OTHER_IDS):
        with torch.no_grad():
            assert torch.equal(model(prompt(), memory_ids=ids).logits, logits(base))
    paths = {path.name: path for path in (tmp_path / "out" / BANKS_FOLDER / kind).iterdir()}
    assert paths.keys() == {"bank.json", "level-1.safetensors", "level-3.safetensors"}
    for level in bank.layout.levels:
        path = paths[level_file(level)]
        header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        assert path.stat().st_size == header + bank.layout.file_bytes(level, torch.bfloat16.itemsize)


def test_the_dtype_of_a_bank_follows_the_output_and_carried_banks_keep_theirs(base, tmp_path):
    upscale(base=base, method="hier-ffn", output=tmp_path / "once", options=SMALL, dtype="bfloat16", verify=False)
    upscale(base=tmp_path / "once", method="hier-kv", output=tmp_path / "twice", options=SMALL, dtype="float32")
    banks = load(tmp_path / "twice").banks
    assert (banks.bank("hier-ffn").dtype, banks.bank("hier-kv").dtype) == (torch.bfloat16, torch.float32)


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
def test_reports_and_records_count_what_is_fetched(kind, fetched, base, command, tmp_path):
    done = command(
        "--base", base, "--method", kind, "--output", tmp_path / "out", "--json", "--set", "sizes=[3,0,2]", "--set", "branching=3"
    )  # fmt: skip
    assert done.status == 0, done.err
    counts = done.json()["parameters"]
    assert counts["fetched"] == 4 * 5 * fetched and counts["bank"] == 4 * (3 * 3 + 2 * 27) * fetched
    assert record_of(tmp_path / "out")["parameters"] == counts
    plain = command("--base", base, "--method", "llama-pro", "--dry-run", "--json").json()["parameters"]
    assert not {"fetched", "bank"} & plain.keys() or (plain["fetched"], plain["bank"]) == (None, None)


def test_the_seed_decides_what_blocks_start_as(base, tmp_path):
    blocks = []
    for number, seed in enumerate((0, 0, 7)):
        folder = tmp_path / str(number)
        upscale(base=base, method="hier-kv", output=folder, options=SMALL, seed=seed, verify=False)
        blocks.append(load(folder).banks.bank("hier-kv").block(3, 5))
    assert torch.equal(blocks[0], blocks[1]) and not torch.equal(blocks[0], blocks[2])


def test_blocks_of_a_second_memory_of_the_same_type_are_others(base, tmp_path):
    """Two that start alike have equal gradients for ever: the second would learn nothing that the first does not."""
    upscale(base=base, method="hier-ffn", output=tmp_path / "once", options=SMALL, verify=False)
    upscale(base=tmp_path / "once", method="hier-ffn", output=tmp_path / "twice", options=SMALL, verify=False)
    banks = load(tmp_path / "twice").banks
    assert not torch.equal(banks.bank("hier-ffn").block(3, 5), banks.bank("hier-ffn-2").block(3, 5))


def test_another_tree_beside_the_first_is_refused(base, command, tmp_path, refused):
    upscale(base=base, method="hier-ffn", output=tmp_path / "once", options=SMALL, verify=False)
    done = command(
        "--base", tmp_path / "once", "--method", "hier-kv", "--output", tmp_path / "out", "--set", "branching=4"
    )
    refused(done, "expected one tree, by whose nodes a text fetches from both.", ["once"])


@pytest.mark.parametrize("damage", ["absent", "cut", "other", "flipped"])
def test_a_base_whose_bank_is_not_its_own_is_refused_and_nothing_is_left(damage, base, command, tmp_path, refused):
    upscale(base=base, method="hier-ffn", output=tmp_path / "new", options=SMALL, verify=False)
    once = trained(tmp_path / "new", tmp_path / "once")
    folder = once / BANKS_FOLDER / "hier-ffn"
    path = folder / "level-3.safetensors"
    if damage == "absent":
        shutil.rmtree(folder)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "other":
        edit_description(folder)
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    for words in (("--base", once, "--method", "llama-pro"), ("--base", once, "--method", "hier-kv", *SET)):
        done = command(*words, "--output", tmp_path / "out", "--no-verify")
        refused(done, str(folder), ["new", "once"])


SET = ("--set", "branching=3", "--set", "sizes=[1,0,0]")


def edit_description(folder):
    path = folder / "bank.json"
    description = json.loads(path.read_text())
    description["layout"]["branching"] = 4
    path.write_text(json.dumps(description))


def test_overwriting_deletes_banks_and_nothing_that_a_person_put_there(base, command, tmp_path):
    request = ("--base", base, "--method", "hier-kv", "--output", tmp_path / "out", "--no-verify", *SET)
    assert command(*request).status == 0
    assert foreign_files(tmp_path / "out") == []
    assert command(*request, "--overwrite").status == 0
    for name in ("notes.txt", "hier-kv/notes.txt", "hier-kv/deeper/level-1.safetensors"):
        path = tmp_path / "out" / BANKS_FOLDER / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
        done = command(*request, "--overwrite")
        assert done.status == 2 and f"{BANKS_FOLDER}/{name}" in done.err and path.read_text() == "mine"
        path.unlink()
    assert command(*request, "--overwrite").status == 0


def test_a_base_on_the_hub_has_its_bank(hub, base, command, tmp_path):
    upscale(base=base, method="hier-ffn", output=tmp_path / "new", options=SMALL, verify=False)
    once = trained(tmp_path / "new", tmp_path / "once")
    hub.repositories["org/base"] = Repository(files=files_of(once))
    done = command("--base", "org/base", "--method", "llama-pro", "--output", tmp_path / "out")
    assert done.status == 0, done.err
    assert torch.equal(logits(tmp_path / "out", memory_ids=IDS), logits(once, memory_ids=IDS))
    assert command("inspect", "org/base").status == 0
    hub.repositories["org/model"] = Repository(files=files_of(tmp_path / "out"))
    done = command("strip", "org/model", "--output", tmp_path / "stripped")
    assert done.status == 0, done.err
    assert torch.equal(logits(tmp_path / "stripped", memory_ids=IDS), logits(once, memory_ids=IDS))
    loaded = AutoModelForCausalLM.from_pretrained("org/base").eval()
    with torch.no_grad():
        assert torch.equal(loaded(prompt(), memory_ids=IDS).logits, logits(once, memory_ids=IDS))


def test_banks_that_are_carried_count_for_the_room_that_is_needed(base, command, tmp_path, monkeypatch):
    upscale(base=base, method="hier-ffn", output=tmp_path / "new", options={"sizes": [1024]}, verify=False)
    once = trained(tmp_path / "new", tmp_path / "once")
    upscale(base=once, method="llama-pro", output=tmp_path / "twice", verify=False)
    requests = {
        "out": ("--base", once, "--method", "llama-pro", "--no-verify"),
        "stripped": ("strip", tmp_path / "twice"),
    }
    spare = {"out": 64_000_000, "stripped": 0}
    for name, words in requests.items():
        for free, status in ((spare[name] + 1_000_000, 2), (spare[name] + 40_000_000, 0)):
            usage = shutil._ntuple_diskusage(10**9, 10**9 - free, free)
            monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
            done = command(*words, "--output", tmp_path / name)
            assert done.status == status, done.err
            assert status == 0 or "GB free. Make room or" in done.err


def test_editing_chapters_carries_banks_along(base, in_process, tmp_path):
    upscale(base=base, method="hier-ffn", output=tmp_path / "new", options=SMALL, verify=False)
    once = trained(tmp_path / "new", tmp_path / "once")
    upscale(base=once, method="moc", output=tmp_path / "twice", verify=False)
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
