"""What single memory methods have of their own: layers, donors, remarks, banks of blocks."""

import shutil

import pytest
import torch
from models.memory_models import IDS, OTHER_IDS
from tiny import prompt

from midus_hf.cli import edit
from midus_hf.files.checkpoint_files import BANKS_FOLDER
from midus_hf.memories.hierarchical.options import level_file
from midus_hf.training.optim import set_trainable
from tests.upscalers.checkpoints import SMALL, save_base, unverified, with_memory
from tests.upscalers.contents import (
    config_of,
    file_digests,
    layer,
    load,
    logits,
    read_tensors,
    record_of,
    same_bits,
    same_tensors,
)
from tests.upscalers.hub_server import Repository, files_of
from tests.upscalers.methods import KINDS, SMALL_CHAPTERS, SMALL_TREE, known, planned, tiny_config, trained
from upscalers.methods.contract import get_method
from upscalers.request import parse_options
from upscalers.runs.upscale import upscale

LAYERS = {None: [2, 6, 10, 14], 4: [2, 6, 10, 14], 0.01: [8], 2: [4, 12], (0, 5, 15): [0, 5, 15], "all": [*range(16)]}
LAYERS |= {"early:3": [0, 1, 2], "middle:3": [6, 7, 8], "late:3": [13, 14, 15]}


@pytest.mark.parametrize("layers", LAYERS)
def test_layers_option_selects_layers(layers):
    given = {} if layers is None else {"layers": [*layers] if isinstance(layers, tuple) else layers}
    config = tiny_config("llama", num_hidden_layers=16)
    method = get_method("moc")
    chosen = method(parse_options(method.options_class, {**SMALL_CHAPTERS, **given}, "moc"))
    entry = chosen.entry(known(config), planned(config, "moc"))
    assert (list(entry.layers), entry.options.type, entry.name) == (LAYERS[layers], "moc", "chapters")


def test_inserted_blocks_host_no_attached_memory(base, command, tmp_path, refused):
    once = unverified(base, tmp_path / "once", placement="1,4")
    twice = unverified(once, tmp_path / "twice", method="moda", options={})
    below, entry = config_of(twice)["memory"]
    assert (below["layers"], entry["type"], entry["layers"]) == ([1, 4], "moda", [0, 2, 3, 5])
    options = {"n": 8, "k": 4, "site": "skip", "span": 2}
    _, entry = config_of(unverified(once, tmp_path / "skips", method="ultramem-v2", options=options))["memory"]
    assert (entry["layers"], entry["into"]) == ([0, 2], [3, 5])
    message = "'depth-attention' ties layers 0, 2, 3, 5 together, .* expected each once. Choose a method that inserts"
    refused(command("--base", twice, "--method", "solar", "--output", tmp_path / "out"), message, None)


def test_tables_of_zeros_are_holes(base, tmp_path):
    """Of 6.3 MB per layer that hold values of zero, the file has holes."""
    options = {"n": 256, "k": 2, "value_width": 24, "pre_value_width": 0, "layers": 2}
    upscale(base=base, method="ultramem-v2", output=tmp_path / "out", options=options, verify=False)
    file = (tmp_path / "out" / "model.safetensors").stat()
    assert file.st_size > 12e6
    assert file.st_blocks * 512 < 2e6
    tensors = read_tensors(tmp_path / "out")
    assert not any(value.any() for name, value in tensors.items() if name.endswith("value_table"))


@pytest.mark.parametrize("kind", ["midus-hml", "midus-pkm", "midus-linear", "midus-hml, output projection"])
def test_block_copies_needed_attention_of_the_next_layer(family, tmp_path, kind):
    base = save_base(tmp_path / "base", family, **({} if family == "qwen2" else {"attention_bias": True}))
    upscale(base=base, output=tmp_path / "out", placement="1,5", **KINDS[kind])
    old, new, projects = read_tensors(base), read_tensors(tmp_path / "out"), kind != "midus-hml"
    wanted = {
        "self_attn.q_proj.weight": True,
        "input_layernorm.weight": True,
        "self_attn.o_proj.weight": projects,
        "self_attn.o_proj.bias": projects and family != "qwen2",
        "post_attention_layernorm.weight": projects and family.startswith("gemma"),
    }
    for index, donor in ((1, 1), (5, 3)):
        copied, source = copied_by_block(new, index), layer(old, donor)
        assert {name: name in copied for name in wanted} == wanted, index
        assert all(torch.equal(tensor, source[name]) for name, tensor in copied.items()), index


def copied_by_block(tensors, index):
    return {name: tensor for name, tensor in layer(tensors, index).items() if not name.startswith("memory.")}


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
        copied, source = copied_by_block(new, index), layer(old, donor)
        assert copied, index
        assert not any("o_proj" in name or "mlp" in name for name in copied), index
        assert all(same_bits(tensor, source[name]) for name, tensor in copied.items()), index
    assert not new["model.layers.0.memory.value_bank"].any()
    assert new["model.layers.1.memory.value_bank"].any()


NOT_CAUSAL = "routing is 'sequence', so chapters are chosen by all tokens of a text, later ones included"
HEADING = "## Know before use"


def test_non_causal_model_is_reported_everywhere(command, base, tmp_path):
    def upscaled(output, routing: str) -> str:
        options = {**SMALL_CHAPTERS, "layers": [1], "routing": routing}
        words = [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
        done = command("--base", base, "--method", "moc", "--output", output, "--no-verify", *words).succeeded()
        return done.err

    out = tmp_path / "out"
    planned = command("--base", base, "--method", "moc", "--dry-run", "--set", "preset=paper").succeeded()
    assert f"upscale: warning: {NOT_CAUSAL}" in planned.err
    assert f"upscale: warning: {NOT_CAUSAL}" in upscaled(out, "sequence")
    assert f"{HEADING}\n\n- {NOT_CAUSAL}" in (out / "README.md").read_text()
    load(out).save_pretrained(tmp_path / "saved")
    again = unverified(out, tmp_path / "again")
    entries = [load(tmp_path / "saved").config.upscale, *(config_of(folder)["upscale"] for folder in (out, again))]
    entries += [record_of(out), command("inspect", out, "--json").json()]
    assert all(entry["causal"] is False for entry in entries)
    assert "the output of a token depends on later tokens" in command("inspect", out).out
    stripped = command("strip", out, "--output", tmp_path / "stripped")
    assert "took out memory chapters. Its weights are the base's" in " ".join(stripped.out.split())
    assert "took out memory chapters" in " ".join(command("inspect", tmp_path / "stripped").out.split())
    for routing in ("chunk", "token"):
        out = tmp_path / routing
        assert "causal" not in upscaled(out, routing)
        assert HEADING not in (out / "README.md").read_text(), routing
        assert "causal" not in config_of(out)["upscale"], routing
        assert command("inspect", out, "--json").json()["causal"] is True, routing
        assert "depends on later tokens" not in command("inspect", out).out, routing


FETCHED = {"hier-ffn": 96, "hier-lora-qk": 112, "hier-lora-vo": 112, "hier-lora-ffn": 240, "hier-kv": 32}


@pytest.mark.parametrize("kind", FETCHED)
def test_empty_bank_is_outside_the_checkpoint(kind, tmp_path):
    base, fetched = save_base(tmp_path / "base", dtype=torch.bfloat16), FETCHED[kind]
    counts = with_memory(base, tmp_path / "out", method=kind, options=SMALL_TREE).parameters
    assert (counts.fetched, counts.bank) == (4 * 5 * fetched, 4 * (3 * 3 + 2 * 27) * fetched)
    model = load(tmp_path / "out")
    bank = model.banks.bank(kind)
    assert same_tensors(tmp_path / "out", base)
    assert bank.written(1) == []
    assert bank.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(model(prompt(), memory_ids=OTHER_IDS).logits, logits(base))
    paths = {path.name: path for path in (tmp_path / "out" / BANKS_FOLDER / kind).iterdir()}
    assert paths.keys() == {"bank.json", "level-1.safetensors", "level-3.safetensors"}
    for level in bank.layout.levels:
        path = paths[level_file(level)]
        size = bank.layout.num_records(level) * (1 + 2 * bank.layout.record_numel(level))
        assert path.stat().st_size == 8 + int.from_bytes(path.read_bytes()[:8], "little") + size


def test_trainable_counts_banks_of_the_base(base, tmp_path):
    first = unverified(base, tmp_path / "first", method="hier-ffn", options=SMALL_TREE)
    counts = with_memory(first, tmp_path / "second", method="hier-kv", options=SMALL_TREE).parameters
    report = set_trainable(load(tmp_path / "second"))
    assert counts.trainable == report.parameters + report.blocks > counts.bank


def test_seed_and_memory_decide_initial_blocks(base, tmp_path):
    """Two that start alike would have equal gradients for ever."""
    blocks = []
    for number, seed in enumerate((0, 0, 7)):
        folder = unverified(base, tmp_path / str(number), method="hier-kv", options=SMALL_TREE, seed=seed)
        blocks.append(load(folder).banks.bank("hier-kv").block(3, 5))
    assert torch.equal(blocks[0], blocks[1])
    assert not torch.equal(blocks[0], blocks[2])
    twice = unverified(tmp_path / "0", tmp_path / "twice", method="hier-kv", options=SMALL_TREE, dtype="bfloat16")
    first, second = (load(twice).banks.bank(name) for name in ("hier-kv", "hier-kv-2"))
    assert not torch.equal(first.block(3, 5).bfloat16(), second.block(3, 5))
    # The dtype of a bank follows the output, and banks that are carried keep theirs.
    assert (first.dtype, second.dtype) == (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def once(shared_base, tmp_path_factory):
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
            content = (folder / "level-3.safetensors").read_bytes()
            (folder / "level-3.safetensors").write_bytes(content[:-1] + b"\x55")
        for method in (("llama-pro",), ("hier-kv", "--set", "branching=3", "--set", "sizes=[1,0,0]")):
            refused(command("--base", copy, "--method", *method, *words), str(folder), ["copy"])


def test_bank_of_a_hub_base_is_downloaded(hub, once, command, tmp_path):
    expected = logits(once, memory_ids=IDS)
    hub.repositories["org/base"] = Repository(files=files_of(once))
    assert command("--base", "org/base", "--method", "llama-pro", "--output", tmp_path / "out").status == 0
    assert command("inspect", "org/base").status == 0
    hub.repositories["org/model"] = Repository(files=files_of(tmp_path / "out"))
    assert command("strip", "org/model", "--output", tmp_path / "stripped").status == 0
    for name in ("out", "stripped"):
        assert torch.equal(logits(tmp_path / name, memory_ids=IDS), expected)


def test_carried_banks_count_for_disk_space(base, command, tmp_path, monkeypatch):
    unverified(base, tmp_path / "new", method="hier-ffn", options={"sizes": [1024]})
    once = trained(tmp_path / "new", tmp_path / "once")
    unverified(once, tmp_path / "twice", method="llama-pro", options={})
    of_upscale = ("--base", once, "--method", "llama-pro", "--no-verify")
    for name, spare, words in (("out", 64_000_000, of_upscale), ("stripped", 0, ("strip", tmp_path / "twice"))):
        for free, status in ((spare + 1_000_000, 2), (spare + 40_000_000, 0)):
            usage = shutil._ntuple_diskusage(10**9, 10**9 - free, free)
            monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
            done = command(*words, "--output", tmp_path / name)
            assert done.status == status, done.err
            assert status == 0 or "GB free. Free some space or" in done.err


def test_chapter_edit_copies_banks(once, in_process, tmp_path):
    unverified(once, tmp_path / "twice", method="moc", options={})
    in_process(edit.main, "prune", tmp_path / "twice", "--chapters", "1", "--output", tmp_path / "edited").succeeded()
    assert file_digests(tmp_path / "edited" / BANKS_FOLDER) == file_digests(once / BANKS_FOLDER) != {}
    assert torch.equal(logits(tmp_path / "edited", memory_ids=IDS), logits(once, memory_ids=IDS))
