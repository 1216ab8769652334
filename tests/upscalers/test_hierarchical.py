"""The methods of hierarchical memories: the base computes the same with them, banks are made, carried along and left behind."""

import json
import shutil

import pytest
import torch
from models.hierarchical_models import IDS, KINDS, OTHER_IDS, add_reference, fill
from pairs import by_default, in_turn
from tiny import prompt, save_tiny_model
from transformers import AutoModelForCausalLM

from midus_hf.banks.memory_bank import MemoryBank
from midus_hf.cli.look import chapters as chapters_command
from midus_hf.config.fetched_blocks import BANKS_FOLDER
from midus_hf.files.ownership import foreign_files
from tests.upscalers.checkpoints import edit_config, file_digests, load, read_tensors, same_tensors
from tests.upscalers.hub_server import Repository, files_of
from tests.upscalers.real_configs import LLAMA_3_2_1B, write_config
from upscalers.request.errors import VerificationError
from upscalers.runs.inspection import inspect_checkpoint
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

SMALL = {"sizes": [3, 0, 2], "branching": 3}
LORA = ("hier-lora-qk", "hier-lora-vo", "hier-lora-ffn")


def logits(folder, ids=None):
    with torch.no_grad():
        return load(folder)(prompt(), **({} if ids is None else {"memory_ids": ids})).logits


def layouts(folder):
    return load(folder).config.memories().banks


def trained(folder, output):
    """The model with blocks that act, of which all but two were written, saved as training saves it."""
    model = load(folder)
    model.save_pretrained(output)
    for name, layout in model.config.memories().banks.items():
        bank = MemoryBank(output / BANKS_FOLDER / name, layout, writable=True)
        fill(bank, but=((1, 0), (3, 2)))
        bank.close()
    for name in ("upscale.json", "README.md"):
        if (folder / name).exists():
            shutil.copy(folder / name, output)
    return output


def bank_of(folder, name):
    return file_digests(folder / BANKS_FOLDER / name)


@pytest.mark.parametrize(("kind", "dtype"), in_turn(KINDS, [torch.float32, torch.bfloat16]), ids=str)
def test_logits_are_those_of_the_base_and_strip_gives_it_back(native_family, kind, dtype, tmp_path):
    base = save_tiny_model(native_family, tmp_path / "base", dtype)
    report = upscale(base=base, method=kind, output=tmp_path / "out", options=SMALL)
    assert report.identity.checked == "logits" and report.identity.max_abs_diff == 0.0
    for ids in (None, IDS, OTHER_IDS):
        assert torch.equal(logits(tmp_path / "out", ids), logits(base))
    model = load(tmp_path / "out")
    assert model.banks.of(kind).dtype == dtype and model.banks.of(kind).written(1) == []
    assert same_tensors(tmp_path / "out", base)  # a bank is beside the checkpoint, not in it
    told = strip(tmp_path / "out", tmp_path / "stripped")
    assert told["base_confirmed"] is True and told["removed_memories"] == [kind]
    assert not (tmp_path / "stripped" / BANKS_FOLDER).exists()
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "stripped" / name).read_bytes() == (base / name).read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_checked_one_by_one_as_well(native_family, kind, shared_base, tmp_path):
    base = shared_base(native_family)
    report = upscale(base=base, method=kind, output=tmp_path / "out", options=SMALL, verify=False)
    assert report.identity.checked == "blocks" and report.identity.max_abs_diff == 0.0
    assert torch.equal(logits(tmp_path / "out", IDS), logits(base))


@pytest.mark.parametrize(("kind", "verify"), in_turn(KINDS, [True, False]))
def test_either_check_would_find_a_block_that_does_not_start_at_zero(kind, verify, base, tmp_path, monkeypatch):
    """Both run the upscaled model with blocks that are fetched, of a leaf's whole path."""

    def not_zero(layout, level, index, seed, dtype):
        value = 0.01 if (level, index) == (3, 26) else 0.0
        return torch.full((layout.record_numel(level),), value, dtype=dtype)

    monkeypatch.setattr("midus_hf.banks.memory_bank.initial_block", not_zero)
    with pytest.raises(VerificationError, match="expected"):
        upscale(base=base, method=kind, output=tmp_path / "out", options=SMALL, verify=verify)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_the_config_says_what_the_memory_is(kind, base, tmp_path):
    upscale(base=base, method=kind, output=tmp_path / "out", options={**SMALL, "layers": [1, 3]}, verify=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    site = {"hier-ffn": "beside-ffn", "hier-lora-ffn": "inside-ffn"}.get(kind, "inside-attention")
    alpha = {"alpha": 2.0} if kind in LORA else {}
    (entry,) = config["memory"]
    assert entry == {
        "type": kind,
        "name": kind,
        "site": site,
        "sizes": [3, 0, 2],
        "branching": 3,
        "without_ids": "none",
        **alpha,
        "layers": [1, 3],
    }
    assert {path.name for path in (tmp_path / "out" / BANKS_FOLDER / kind).iterdir()} == {
        "bank.json",
        "level-1.safetensors",
        "level-3.safetensors",
    }


def test_a_dry_run_prices_the_bank_of_llama_and_makes_none(command, tmp_path):
    folder = write_config(tmp_path / "base", LLAMA_3_2_1B)
    done = command("--base", folder, "--method", "hier-ffn", "--dry-run", "--json", "--set", "sizes=[768,256,16,0]")
    assert done.status == 0, done.err
    counts = done.json()["parameters"]
    assert (counts["fetched"], counts["bank"]) == (102_236_160, 14_092_861_440)
    assert counts["new"] == 0 and counts["base"] == counts["total"]
    assert [path.name for path in folder.iterdir()] == ["config.json"]


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
    assert json.loads((tmp_path / "out" / "upscale.json").read_text())["parameters"] == counts
    plain = command("--base", base, "--method", "llama-pro", "--dry-run", "--json").json()["parameters"]
    assert not {"fetched", "bank"} & plain.keys() or (plain["fetched"], plain["bank"]) == (None, None)


def test_the_seed_decides_what_blocks_start_as(base, tmp_path):
    blocks = []
    for number, seed in enumerate((0, 0, 7)):
        folder = tmp_path / str(number)
        upscale(base=base, method="hier-kv", output=folder, options=SMALL, seed=seed, verify=False)
        blocks.append(load(folder).banks.of("hier-kv").block(3, 5))
    assert torch.equal(blocks[0], blocks[1]) and not torch.equal(blocks[0], blocks[2])


BELOW = {
    "llama-pro": (KINDS, {}),
    "self": (KINDS, {**SMALL, "layers": [0, 2]}),
    "moc": (("hier-ffn", "hier-kv"), {}),
    "midus-hml": (("hier-ffn", "hier-kv"), {"n": 8, "k": 2}),
}


@pytest.mark.parametrize(
    ("second", "kind", "verify"),
    by_default(
        [
            ("llama-pro", "hier-ffn", True),
            ("llama-pro", "hier-lora-qk", False),
            ("self", "hier-lora-ffn", False),
            ("self", "hier-lora-vo", True),
            ("moc", "hier-kv", False),
            ("midus-hml", "hier-ffn", True),
        ],
        [(second, kind, number % 2 == 0) for second, (kinds, _) in BELOW.items() for number, kind in enumerate(kinds)],
    ),
)
def test_a_trained_one_keeps_acting_below_another_method_and_comes_back(
    second, kind, verify, family, shared_base, tmp_path
):
    base = shared_base(family)
    upscale(base=base, method=kind, output=tmp_path / "new", options=SMALL, verify=False)
    once = trained(tmp_path / "new", tmp_path / "once")
    assert not torch.allclose(logits(once, IDS), logits(base))
    method, (_, options) = kind if second == "self" else second, BELOW[second]
    report = upscale(base=once, method=method, output=tmp_path / "twice", options=options, verify=verify)
    assert report.identity.max_abs_diff == 0.0
    for ids in (None, IDS, OTHER_IDS):
        assert torch.equal(logits(tmp_path / "twice", ids), logits(once, ids))
    carried, before = bank_of(tmp_path / "twice", kind), bank_of(once, kind)
    moved = carried.pop("bank.json") != before.pop("bank.json")
    assert carried == before and moved == (second in ("llama-pro", "midus-hml")), "it names its layers where they are"
    banks = layouts(tmp_path / "twice")
    if second == "llama-pro":
        assert len(banks[kind].layers) == 4 and banks[kind].layers != (0, 1, 2, 3)
        assert report.num_layers > 4
    elif second == "self":
        assert list(banks) == [kind, f"{kind}-2"] and banks[f"{kind}-2"].layers == (0, 2)
    assert strip(tmp_path / "twice", tmp_path / "stripped")["base_confirmed"] is True
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "stripped" / name).read_bytes() == (once / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "stripped" / BANKS_FOLDER).iterdir()) == [kind]
    assert bank_of(tmp_path / "stripped", kind) == bank_of(once, kind)
    assert torch.equal(logits(tmp_path / "stripped", IDS), logits(once, IDS))


@pytest.mark.parametrize(
    ("first", "kind"),
    by_default(
        [("llama-pro", "hier-lora-ffn"), ("llama-pro", "hier-lora-vo"), ("moc", "hier-ffn"), ("midus-hml", "hier-kv")],
        [(first, kind) for first, (kinds, _) in BELOW.items() if first != "self" for kind in kinds],
    ),
)
def test_it_goes_on_top_of_another_method_and_comes_off(first, kind, shared_base, tmp_path):
    options = BELOW[first][1]
    upscale(base=shared_base("gemma3"), method=first, output=tmp_path / "once", options=options, verify=False)
    report = upscale(base=tmp_path / "once", method=kind, output=tmp_path / "twice", options=SMALL)
    assert report.identity.max_abs_diff == 0.0
    assert torch.equal(logits(tmp_path / "twice", IDS), logits(tmp_path / "once"))
    assert len(layouts(tmp_path / "twice")[kind].layers) == (4 if first != "llama-pro" else report.num_layers)
    assert strip(tmp_path / "twice", tmp_path / "stripped")["base_confirmed"] is True
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "stripped" / name).read_bytes() == (tmp_path / "once" / name).read_bytes()
    assert not (tmp_path / "stripped" / BANKS_FOLDER).exists()


def test_blocks_of_a_second_memory_of_the_same_type_are_others(base, tmp_path):
    """Two that start alike have equal gradients for ever: the second would learn nothing that the first does not."""
    upscale(base=base, method="hier-ffn", output=tmp_path / "once", options=SMALL, verify=False)
    upscale(base=tmp_path / "once", method="hier-ffn", output=tmp_path / "twice", options=SMALL, verify=False)
    banks = load(tmp_path / "twice").banks
    assert not torch.equal(banks.of("hier-ffn").block(3, 5), banks.of("hier-ffn-2").block(3, 5))


def test_what_acts_after_upscaling_is_what_hooks_on_the_base_compute(base, tmp_path):
    upscale(base=base, method="hier-lora-ffn", output=tmp_path / "once", options={**SMALL, "alpha": 1.5}, verify=False)
    upscale(base=tmp_path / "once", method="hier-kv", output=tmp_path / "twice", options=SMALL, verify=False)
    folder = trained(tmp_path / "twice", tmp_path / "trained")
    native = load(base)
    add_reference(native, load(folder), IDS)
    with torch.no_grad():
        torch.testing.assert_close(logits(folder, IDS), native(prompt()).logits, rtol=1e-4, atol=1e-5)


def test_the_dtype_of_the_bank_follows_the_output_and_carried_ones_stay(base, tmp_path):
    upscale(base=base, method="hier-ffn", output=tmp_path / "once", options=SMALL, dtype="bfloat16", verify=False)
    assert load(tmp_path / "once").banks.of("hier-ffn").dtype == torch.bfloat16
    upscale(base=tmp_path / "once", method="hier-kv", output=tmp_path / "twice", options=SMALL, dtype="float32")
    banks = load(tmp_path / "twice").banks
    assert (banks.of("hier-ffn").dtype, banks.of("hier-kv").dtype) == (torch.bfloat16, torch.float32)


def test_another_tree_beside_the_first_is_refused(base, command, tmp_path):
    upscale(base=base, method="hier-ffn", output=tmp_path / "once", options=SMALL, verify=False)
    done = command(
        "--base", tmp_path / "once", "--method", "hier-kv", "--output", tmp_path / "out", "--set", "branching=4"
    )
    assert done.status == 2 and len(done.err.strip().splitlines()) == 1
    assert "expected one tree, by whose nodes a text fetches from both." in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["absent", "cut", "other", "flipped"])
def test_a_base_whose_bank_is_not_its_own_is_refused_and_nothing_is_left(damage, base, command, tmp_path):
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
        assert done.status == 2 and len(done.err.strip().splitlines()) == 1, done.err
        assert str(folder) in done.err and not (tmp_path / "out").exists()


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
    for place in ("notes.txt", "hier-kv/notes.txt", "hier-kv/deeper/level-1.safetensors"):
        path = tmp_path / "out" / BANKS_FOLDER / place
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
        done = command(*request, "--overwrite")
        assert done.status == 2 and f"{BANKS_FOLDER}/{place}" in done.err and path.read_text() == "mine"
        path.unlink()
    assert command(*request, "--overwrite").status == 0


def test_a_base_on_the_hub_has_its_bank(hub, base, command, tmp_path):
    upscale(base=base, method="hier-ffn", output=tmp_path / "new", options=SMALL, verify=False)
    once = trained(tmp_path / "new", tmp_path / "once")
    hub.repositories["org/base"] = Repository(files=files_of(once))
    done = command("--base", "org/base", "--method", "llama-pro", "--output", tmp_path / "out")
    assert done.status == 0, done.err
    assert torch.equal(logits(tmp_path / "out", IDS), logits(once, IDS))
    assert command("inspect", "org/base").status == 0
    hub.repositories["org/model"] = Repository(files=files_of(tmp_path / "out"))
    done = command("strip", "org/model", "--output", tmp_path / "stripped")
    assert done.status == 0, done.err
    assert torch.equal(logits(tmp_path / "stripped", IDS), logits(once, IDS))
    loaded = AutoModelForCausalLM.from_pretrained("org/base").eval()
    with torch.no_grad():
        assert torch.equal(loaded(prompt(), memory_ids=IDS).logits, logits(once, IDS))


def test_editing_chapters_carries_banks_along(base, in_process, tmp_path):
    upscale(base=base, method="hier-ffn", output=tmp_path / "new", options=SMALL, verify=False)
    once = trained(tmp_path / "new", tmp_path / "once")
    upscale(base=once, method="moc", output=tmp_path / "twice", verify=False)
    words = ("swap", tmp_path / "twice", "--chapters", "1,2", "--output", tmp_path / "edited")
    done = in_process(chapters_command.main, "midus-chapters", *words)
    assert done.status == 0, done.err
    assert bank_of(tmp_path / "edited", "hier-ffn") == bank_of(once, "hier-ffn")
    assert torch.equal(logits(tmp_path / "edited", IDS), logits(once, IDS))


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


def test_inspect_tells_of_the_memory(base, command, tmp_path):
    upscale(base=base, method="hier-lora-vo", output=tmp_path / "out", options=SMALL, verify=False)
    found = inspect_checkpoint(tmp_path / "out")
    assert found["method"] == "hier-lora-vo" and "hier-lora-vo" in json.dumps(found["memory"])
    counts = upscale(base=base, method="hier-lora-vo", options=SMALL, dry_run=True).parameters
    assert (found["parameters"]["fetched"], found["parameters"]["bank"]) == (counts.fetched, counts.bank)
    done = command("inspect", tmp_path / "out")
    assert done.status == 0 and "hier-lora-vo" in done.out
    assert f"of which a text fetches {counts.fetched:,}" in " ".join(done.out.split())


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("hier-ffn", "branching=1", "branching is 1; expected 2 or more."),
        ("hier-ffn", "branching=100000", "branching is 100000 and sizes has 4 levels, which make more leaves than memory_ids, int64"),
        ("hier-ffn", "sizes=[0,0]", "sizes is [0, 0]; expected a size for each level of the tree, 0 or more, and not all"),
        ("hier-ffn", "sizes=[]", "sizes is []; expected a size for each level of the tree"),
        ("hier-kv", "sizes=[4,-1]", "sizes is [4, -1]; expected a size for each level of the tree, 0 or more"),
        ("hier-kv", "sizes=4", "sizes"),
        ("hier-kv", "sizes=[a]", "sizes"),
        ("hier-lora-qk", "alpha=0", "alpha is 0.0; expected a number above 0."),
        ("hier-lora-vo", "alpha=nan", "alpha is 'nan'; expected a number."),
        ("hier-lora-ffn", "alpha=inf", "alpha is 'inf'; expected a number."),
        ("hier-ffn", "alpha=2", "alpha"),
        ("hier-ffn", "without_ids=some", "without_ids"),
        ("hier-ffn", "site=skip", "site is 'skip'; expected one of: beside-ffn."),
        ("hier-kv", "site=beside-ffn", "site is 'beside-ffn'; expected one of: inside-attention."),
        ("hier-kv", "layers=[4]", "layers is [4]; expected all, a number from 1 to 4"),
        ("hier-kv", "rank=4", "rank"),
    ],
)  # fmt: skip
def test_requests_that_do_not_fit_are_refused(command, base, tmp_path, kind, words, message):
    done = command("--base", base, "--method", kind, "--output", tmp_path / "out", "--set", words)
    assert done.status == 2 and len(done.err.strip().splitlines()) == 1
    assert message in done.err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words", [("--num-new-layers", "2"), ("--placement", "top-heavy")], ids=lambda words: words[0]
)
def test_places_of_new_layers_are_refused(command, base, tmp_path, words):
    done = command("--base", base, "--method", "hier-ffn", "--output", tmp_path / "out", *words)
    assert done.status == 2 and "attaches memory to layers that there are" in done.err


def test_a_model_in_two_files_has_a_bank_too(tmp_path):
    base = save_tiny_model("qwen3", tmp_path / "base", max_shard_size="20KB")
    upscale(base=base, method="hier-ffn", output=tmp_path / "out", options=SMALL)
    assert torch.equal(logits(tmp_path / "out", IDS), logits(base))
    assert read_tensors(tmp_path / "out").keys() == read_tensors(base).keys()


def test_a_bank_that_belongs_to_another_config_is_found_when_the_model_loads(base, tmp_path):
    upscale(base=base, method="hier-ffn", output=tmp_path / "out", options=SMALL, verify=False)
    (entry,) = json.loads((tmp_path / "out" / "config.json").read_text())["memory"]
    edit_config(tmp_path / "out", memory=[{**entry, "sizes": [3, 0, 4]}])
    with pytest.raises(ValueError, match="belongs to another model"):
        load(tmp_path / "out")
