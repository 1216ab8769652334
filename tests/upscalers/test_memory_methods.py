"""What single memory methods have of their own: layers, donors, remarks, banks of blocks; `test_every_method` has what all share."""

import shutil

import pytest
import torch
from models.memory_models import IDS, OTHER_IDS
from tiny import prompt

from midus_hf.cli import edit
from midus_hf.files.checkpoint_files import BANKS_FOLDER
from midus_hf.memories.hierarchical.options import level_file
from midus_hf.training.optim import set_trainable
from tests.upscalers.checkpoints import (
    SMALL,
    config_of,
    file_digests,
    layer,
    load,
    logits,
    read_tensors,
    record_of,
    same_bits,
    same_tensors,
    save_base,
    unverified,
    with_memory,
)
from tests.upscalers.dense.requests import tiny_config, upscaled_config
from tests.upscalers.hub_server import Repository, files_of
from tests.upscalers.methods import KINDS, SMALL_CHAPTERS, SMALL_TREE, trained
from upscalers.runs.upscale import upscale


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        *((quarter, [2, 6, 10, 14]) for quarter in (None, 4)),
        (0.01, [8]),
        (2, [4, 12]),
        ([0, 5, 15], [0, 5, 15]),
        ("all", list(range(16))),
        ("early:3", [0, 1, 2]),
        ("middle:3", [6, 7, 8]),
        ("late:3", [13, 14, 15]),
    ],
)
def test_layers_option_selects_layers(layers, expected):
    options = {**SMALL_CHAPTERS, **({} if layers is None else {"layers": layers})}
    config = upscaled_config(tiny_config("llama", num_hidden_layers=16), "moc", options=options)
    (entry,) = config["memory"]
    assert entry["layers"] == expected and (entry["type"], entry["name"]) == ("moc", "chapters")


def test_inserted_blocks_host_no_attached_memory(base, command, tmp_path):
    once = unverified(base, tmp_path / "once", placement="1,4")
    twice = unverified(once, tmp_path / "twice", method="moda", options={})
    below, entry = config_of(twice)["memory"]
    assert (below["layers"], entry["type"], entry["layers"]) == ([1, 4], "moda", [0, 2, 3, 5])
    options = {"n": 8, "k": 4, "site": "skip", "span": 2}
    _, entry = config_of(unverified(once, tmp_path / "skips", method="ultramem-v2", options=options))["memory"]
    assert (entry["layers"], entry["into"]) == ([0, 2], [3, 5])
    done = command("--base", twice, "--method", "solar", "--output", tmp_path / "out")
    message = (
        "memory 'depth-attention' ties layers 0, 2, 3, 5 together, and the plan repeats some of them; expected each once. "
        "Choose a method that inserts layers."
    )
    assert done.status == 2 and message in done.err and not (tmp_path / "out").exists()


def test_tables_of_zeros_are_holes(base, tmp_path):
    """Of 6.3 MB per layer that hold values of zero, the file has holes."""
    options = {"n": 256, "k": 2, "value_width": 24, "pre_value_width": 0, "layers": 2}
    upscale(base=base, method="ultramem-v2", output=tmp_path / "out", options=options, verify=False)
    file = (tmp_path / "out" / "model.safetensors").stat()
    assert file.st_size > 12e6 and file.st_blocks * 512 < 2e6
    assert not any(
        value.any() for name, value in read_tensors(tmp_path / "out").items() if name.endswith("value_table")
    )


@pytest.mark.parametrize("kind", ["midus-hml", "midus-pkm", "midus-linear", "midus-hml, output projection"])
def test_block_copies_needed_attention_of_the_next_layer(family, tmp_path, kind):
    base = save_base(tmp_path / "base", family, **({} if family == "qwen2" else {"attention_bias": True}))
    upscale(base=base, output=tmp_path / "out", placement="1,5", **KINDS[kind])
    old, new = read_tensors(base), read_tensors(tmp_path / "out")
    projects = kind != "midus-hml"
    wanted = {
        "self_attn.q_proj.weight": True,
        "input_layernorm.weight": True,
        "self_attn.o_proj.weight": projects,
        "self_attn.o_proj.bias": projects and family != "qwen2",
        "post_attention_layernorm.weight": projects and family.startswith("gemma"),
    }
    for index, donor in ((1, 1), (5, 3)):
        copied, source = {n: t for n, t in layer(new, index).items() if not n.startswith("memory.")}, layer(old, donor)
        assert {name: name in copied for name in wanted} == wanted
        assert all(torch.equal(tensor, source[name]) for name, tensor in copied.items())


def test_tensors_start_with_declared_values(tmp_path):
    base = save_base(tmp_path / "base", hidden_size=64, num_attention_heads=2)
    options = {"n": 16, "k": 2}
    upscale(base=base, method="midus-pkm", output=tmp_path / "out", options=options, placement="1,3")
    tensors = read_tensors(tmp_path / "out")
    first, second = ({n.rpartition("memory.")[2]: tensors[n] for n in tensors if f".{i}.memory." in n} for i in (1, 3))
    for zero in ("value_bank", "query_norm_bias", "query_mean"):
        assert not first[zero].any()
    for one in ("query_norm_weight", "query_variance"):
        assert torch.equal(first[one], torch.ones(2, 32))
    assert first["query_projection.weight"].std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert 0.24 < first["row_keys"].abs().max() <= 0.25
    for random in ("query_projection.weight", "row_keys", "column_keys"):
        assert not torch.equal(first[random], second[random])


@pytest.mark.parametrize(("method", "family"), [("midus-pkm", "llama"), ("midus-linear", "gemma2")])
def test_attention_source_skips_layers_without_o_proj(family, shared_base, tmp_path, method):
    once = unverified(shared_base(family), tmp_path / "once", placement="0,3,6")  # beside 1, between 2 and 4, beside 5
    output = unverified(once, tmp_path / "twice", method=method, options=SMALL[method], placement="0,4,9")
    plan = config_of(output)["upscale"]["plan"]
    assert [plan[index]["sources"] for index in (0, 4, 9)] == [[1], [4], [5]]
    old, new, name = read_tensors(once), read_tensors(output), "model.layers.{}.self_attn.o_proj.weight"
    assert all(same_bits(new[name.format(i)], old[name.format(donor)]) for i, donor in ((0, 1), (4, 4), (9, 5)))
    assert torch.equal(logits(shared_base(family)), logits(output))


def test_block_next_to_a_block_copies_its_attention(shared_base, tmp_path):
    once = trained(unverified(shared_base("gemma3"), tmp_path / "once", placement="0,5"), tmp_path / "trained")
    old, new = read_tensors(once), read_tensors(unverified(once, tmp_path / "twice", placement="0,7"))
    for index, donor in ((0, 0), (7, 5)):
        copied, source = {n: t for n, t in layer(new, index).items() if not n.startswith("memory.")}, layer(old, donor)
        assert copied and not any("o_proj" in name or "mlp" in name for name in copied)
        assert all(same_bits(tensor, source[name]) for name, tensor in copied.items())
    assert not new["model.layers.0.memory.value_bank"].any() and new["model.layers.1.memory.value_bank"].any()


NOT_CAUSAL = "routing is 'sequence', so chapters are chosen by all tokens of a text, later ones included"
HEADING = "## Know before use"


def upscaled_with(command, base, output, routing: str):
    options = {**SMALL_CHAPTERS, "layers": [1], "routing": routing}
    words = [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
    done = command("--base", base, "--method", "moc", "--output", output, "--no-verify", *words)
    assert done.status == 0, done.err
    return done


def test_non_causal_model_is_reported_everywhere(command, base, tmp_path):
    out = tmp_path / "out"
    planned = command("--base", base, "--method", "moc", "--dry-run", "--set", "preset=paper")
    assert planned.status == 0 and f"upscale: warning: {NOT_CAUSAL}" in planned.err
    assert f"upscale: warning: {NOT_CAUSAL}" in upscaled_with(command, base, out, "sequence").err
    assert f"{HEADING}\n\n- {NOT_CAUSAL}" in (out / "README.md").read_text()
    assert config_of(out)["upscale"]["causal"] is record_of(out)["causal"] is False
    load(out).save_pretrained(tmp_path / "saved")
    assert load(tmp_path / "saved").config.upscale["causal"] is False
    again = unverified(out, tmp_path / "again")
    assert config_of(again)["upscale"]["causal"] is False
    assert command("inspect", out, "--json").json()["causal"] is False
    assert "the output of a token depends on later tokens" in command("inspect", out).out
    stripped = command("strip", out, "--output", tmp_path / "stripped")
    assert "took out memory chapters. Its weights are the base's" in " ".join(stripped.out.split())
    assert "took out memory chapters" in " ".join(command("inspect", tmp_path / "stripped").out.split())
    for routing in ("chunk", "token"):
        out = tmp_path / routing
        assert "causal" not in upscaled_with(command, base, out, routing).err
        assert HEADING not in (out / "README.md").read_text()
        assert "causal" not in config_of(out)["upscale"]
        assert command("inspect", out, "--json").json()["causal"] is True
        assert "depends on later tokens" not in command("inspect", out).out


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
def test_empty_bank_is_outside_the_checkpoint(kind, fetched, tmp_path):
    base = save_base(tmp_path / "base", dtype=torch.bfloat16)
    counts = with_memory(base, tmp_path / "out", method=kind, options=SMALL_TREE).parameters
    assert counts.fetched == 4 * 5 * fetched and counts.bank == 4 * (3 * 3 + 2 * 27) * fetched
    model = load(tmp_path / "out")
    bank = model.banks.bank(kind)
    assert same_tensors(tmp_path / "out", base) and bank.written(1) == [] and bank.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(model(prompt(), memory_ids=OTHER_IDS).logits, logits(base))
    paths = {path.name: path for path in (tmp_path / "out" / BANKS_FOLDER / kind).iterdir()}
    assert paths.keys() == {"bank.json", "level-1.safetensors", "level-3.safetensors"}
    for level in bank.layout.levels:
        path = paths[level_file(level)]
        header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        assert path.stat().st_size == header + bank.layout.num_records(level) * (
            1 + 2 * bank.layout.record_numel(level)
        )


def test_trainable_counts_banks_of_the_base(base, tmp_path):
    first = unverified(base, tmp_path / "first", method="hier-ffn", options=SMALL_TREE)
    counts = with_memory(first, tmp_path / "second", method="hier-kv", options=SMALL_TREE).parameters
    report = set_trainable(load(tmp_path / "second"))
    assert counts.trainable == report.parameters + report.blocks > counts.bank


def test_seed_and_memory_decide_initial_blocks(base, tmp_path):
    """Two that start alike have equal gradients for ever: the second would learn nothing that the first does not."""
    blocks = []
    for number, seed in enumerate((0, 0, 7)):
        folder = unverified(base, tmp_path / str(number), method="hier-kv", options=SMALL_TREE, seed=seed)
        blocks.append(load(folder).banks.bank("hier-kv").block(3, 5))
    assert torch.equal(blocks[0], blocks[1]) and not torch.equal(blocks[0], blocks[2])
    twice = unverified(tmp_path / "0", tmp_path / "twice", method="hier-kv", options=SMALL_TREE, dtype="bfloat16")
    first, second = (load(twice).banks.bank(name) for name in ("hier-kv", "hier-kv-2"))
    assert not torch.equal(first.block(3, 5).bfloat16(), second.block(3, 5))
    # The dtype of a bank follows the output, and banks that are carried keep theirs.
    assert (first.dtype, second.dtype) == (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def once(shared_base, tmp_path_factory):
    """Return a trained model with a bank of blocks; nobody may change it."""
    folder = tmp_path_factory.mktemp("once")
    unverified(shared_base(), folder / "new", method="hier-ffn", options=SMALL_TREE)
    return trained(folder / "new", folder / "once")


def test_damaged_or_other_bank_is_refused(once, command, tmp_path, refused):
    words = ("--output", tmp_path / "out", "--no-verify")
    done = command("--base", once, "--method", "hier-kv", "--set", "branching=4", *words)
    refused(done, "expected one tree, by whose nodes a text fetches from both.")
    for damage in ("absent", "flipped"):
        copy = shutil.copytree(once, tmp_path / "copy" / damage)
        folder = copy / BANKS_FOLDER / "hier-ffn"
        if damage == "absent":
            shutil.rmtree(folder)
        else:
            path = folder / "level-3.safetensors"
            path.write_bytes(path.read_bytes()[:-1] + b"\x55")
        for method in (("llama-pro",), ("hier-kv", "--set", "branching=3", "--set", "sizes=[1,0,0]")):
            refused(command("--base", copy, "--method", *method, *words), str(folder), ["copy"])


def test_bank_of_a_hub_base_is_downloaded(hub, once, command, tmp_path):
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


@pytest.fixture
def leave_free(monkeypatch):
    def leave(free):
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - free, free))

    return leave


def test_carried_banks_count_for_disk_space(base, command, tmp_path, leave_free):
    unverified(base, tmp_path / "new", method="hier-ffn", options={"sizes": [1024]})
    once = trained(tmp_path / "new", tmp_path / "once")
    unverified(once, tmp_path / "twice", method="llama-pro", options={})
    requests = (
        ("out", 64_000_000, ("--base", once, "--method", "llama-pro", "--no-verify")),
        ("stripped", 0, ("strip", tmp_path / "twice")),
    )
    for name, spare, words in requests:
        for free, status in ((spare + 1_000_000, 2), (spare + 40_000_000, 0)):
            leave_free(free)
            done = command(*words, "--output", tmp_path / name)
            assert done.status == status, done.err
            assert status == 0 or "GB free. Free some space or" in done.err


def test_chapter_edit_copies_banks(once, in_process, tmp_path):
    unverified(once, tmp_path / "twice", method="moc", options={})
    words = ("prune", tmp_path / "twice", "--chapters", "1", "--output", tmp_path / "edited")
    done = in_process(edit.main, *words)
    assert done.status == 0, done.err
    banks = [file_digests(folder / BANKS_FOLDER) for folder in (tmp_path / "edited", once)]
    assert banks[0] == banks[1] != {}
    assert torch.equal(logits(tmp_path / "edited", memory_ids=IDS), logits(once, memory_ids=IDS))
