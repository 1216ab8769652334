"""What holds for every kind of model that a method makes, on any family."""

import itertools
from collections.abc import Iterable
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
import torch
from pairs import by_default, taking_turns
from tiny import NATIVE_FAMILIES, NUM_LAYERS, prompt

from midus_hf.config.declared_tensors import ZEROS
from midus_hf.files.checkpoint_files import BANKS_FOLDER
from tests.upscalers.checkpoints import RECORD, save_base
from tests.upscalers.contents import (
    config_of,
    content_digest,
    file_digests,
    load,
    logits,
    read_tensors,
    recipe_of,
    record_of,
    same_tensors,
)
from tests.upscalers.methods import DIFFERING, KINDS, PLAIN, REQUESTS, Made, arguments_of, memory_ids, trained
from upscalers.methods import memory_methods
from upscalers.request import VerificationError
from upscalers.runs.inspection import inspect_checkpoint
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale
from upscalers.runs.writing import CheckpointFolder
from upscalers.tensors.recipes import Fill

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXACT, OTHERWISE = "Before any training it computes exactly", "before that it is not guaranteed to compute"
FAMILY_OF = dict(taking_turns(KINDS, NATIVE_FAMILIES))


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Make a kind from a family's base, once; bases are of one file or sharded and of each dtype, in turn."""

    @cache
    def made(kind: str, family: str) -> Made:
        folder, number = tmp_path_factory.mktemp("made"), list(KINDS).index(kind)
        shards = {"max_shard_size": "30KB"} if number % 2 else {}
        base = save_base(folder / "base", family, DTYPES[number % 3], **shards)
        before = file_digests(base)
        report = upscale(base=base, output=folder / "out", max_shard_size="40KB", verify=True, **KINDS[kind])
        assert file_digests(base) == before
        assert sorted(path.name for path in folder.iterdir()) == ["base", "out"]
        return Made(kind, base, folder / "out", report)

    return made


@pytest.fixture
def made(kind, family, make) -> Made:
    return make(kind, family)


def each_of(kinds: Iterable[str]) -> pytest.MarkDecorator:
    """Return parameters: by default each kind with one family, the same one in all tests."""
    kinds = list(kinds)
    once = [(kind, FAMILY_OF[kind]) for kind in kinds]
    return pytest.mark.parametrize(("kind", "family"), by_default(once, itertools.product(kinds, NATIVE_FAMILIES)))


of_all, of_each_method = each_of(KINDS), each_of(PLAIN)
# One kind of each method, and those whose tensors are of other parts of a model, shared by other layers, or buffers.
of_all_tensors = each_of(
    (
        *PLAIN, "stack, another order", *(f"midus-hml, {name}" for name in ("output projection", "batch norm")),
        *(f"moc, {name}" for name in ("own", "neighbours")), *(f"ultramem-v2, {name}" for name in ("ring", "no square", "skip")),
        *(f"moda, {name}" for name in ("projected", "some")),
    )
)  # fmt: skip


def generated(folder: Path) -> tuple[torch.dtype, torch.Tensor]:
    """Return a model's dtype, and what it generates with its cache after a long prompt."""
    model, settings = load(folder), {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    return model.dtype, model.generate(prompt(), **settings, **memory_ids(model))


def computed(folder: Path, dtype: torch.dtype | str = "auto") -> torch.Tensor:
    model = load(folder, dtype)
    with torch.no_grad():
        return model(prompt(), **memory_ids(model)).logits


@of_all
def test_new_model_equals_its_base_if_promised(made):
    report, identical = made.report, made.kind not in DIFFERING
    assert report.promises_identity is identical
    assert report.identity.checked == "logits"
    assert (report.identity.max_abs_diff == 0.0) == (report.kl_divergence == 0.0) == identical
    assert torch.equal(computed(made.output), logits(made.base)) == identical
    card = (made.output / "README.md").read_text()
    assert (EXACT in card, OTHERWISE in card) == (identical, not identical)
    if identical and made.kind in PLAIN:
        (dtype, text), (base_dtype, base_text) = generated(made.output), generated(made.base)
        assert dtype == base_dtype
        assert torch.equal(text, base_text)


@of_each_method
def test_dry_run_reports_what_the_run_reports(made, tmp_path):
    (tmp_path / "config.json").write_bytes((made.base / "config.json").read_bytes())
    done = made.report
    for base in (made.base, tmp_path):
        planned = upscale(base=base, dry_run=True, **KINDS[made.kind])
        for key in ("method", "model_type", "num_layers", "new_layer_indices", "parameters", "promises_identity"):
            assert getattr(planned, key) == getattr(done, key), key
        assert planned.bytes.written == sum(tensor.nbytes for tensor in read_tensors(made.output).values())
    banks = sum(path.stat().st_blocks * 512 for path in (made.output / BANKS_FOLDER).glob("*/*"))
    assert done.bytes.written == banks + sum(path.stat().st_size for path in made.output.glob("*.safetensors"))
    for folder, number in ((made.output, done.parameters.total), (made.base, done.parameters.base)):
        assert number == sum(parameter.numel() for parameter in load(folder).parameters())
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@of_each_method
def test_config_and_record_agree_with_the_report(made):
    report, entry = made.report, made.config["upscale"]
    record = record_of(made.output)
    assert record.items() >= entry.items()
    assert record["parameters"] == asdict(report.parameters)
    assert (entry["method"], entry["new_layers"]) == (report.method, report.new_layer_indices)
    assert entry["base_sha256"] == content_digest(read_tensors(made.base))
    assert entry["base_config"] == config_of(made.base)
    assert len(entry["plan"]) == made.config["num_hidden_layers"] == report.num_layers


@of_each_method
def test_inspect_agrees_with_the_report(made):
    report, inspected = made.report, inspect_checkpoint(made.output)
    assert {key: inspected["parameters"][key] for key in ("total", "new")}.items() <= asdict(report.parameters).items()
    assert [row["index"] for row in inspected["layers"] if row["new"]] == report.new_layer_indices
    assert (inspected["method"], inspected["base"]) == (report.method, made.base.name)
    assert inspected["options"].items() >= KINDS[made.kind]["options"].items()
    assert inspected["memory"] == made.config.get("memory", [])


@each_of(REQUESTS)
def test_dense_model_is_of_its_base_class_without_code(made):
    entry = made.config["upscale"]
    follows = dict.fromkeys(("num_hidden_layers", "layer_types", "upscale"))
    assert {**made.config, **follows} == {**entry["base_config"], **follows}
    assert entry["trainable"] == ("all" if made.kind in ("solar", "stack") else "new")
    assert not list(made.output.glob("*.py"))
    assert "trust_remote_code" not in (made.output / "README.md").read_text()


@each_of(kind for kind in PLAIN if kind not in REQUESTS)
def test_config_has_one_entry_with_the_memory_options(made):
    entry, (memory,) = made.config["upscale"], made.config["memory"]
    named = {"name"} if memory["site"] != "inserted" else set()
    known = {"type", "site", "layers", *entry["options"]} | named
    # Options of only one site, and of what engram is made from.
    made_from = {"span", "corpus", "compress", "min_documents", "names"}
    assert known - made_from <= memory.keys() <= known
    assert all(memory.get(key, value) == value for key, value in entry["options"].items() if key != "layers")
    assert entry.get("new_memories", []) == [memory[key] for key in named]


@of_each_method
def test_strip_restores_every_file_of_the_base(made, tmp_path):
    folder, index = tmp_path / "stripped", "model.safetensors.index.json"
    stripped, expected = strip(made.output, folder), {"base_confirmed": True, "differing_tensors": 0}
    expected["removed_memories"] = [entry["name"] for entry in made.config.get("memory", []) if "name" in entry]
    expected |= {"num_layers": NUM_LAYERS, "removed_layer_indices": made.report.new_layer_indices}
    expected["bytes_written"] = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert stripped.items() >= expected.items()
    assert file_digests(folder, (*RECORD, index)) == file_digests(made.base, (index,))
    for ours in (made.output, folder):
        CheckpointFolder(ours, overwrite=True)  # which refuses what is not ours


@of_all_tensors
def test_trained_model_reloads_and_strips_by_its_config(made, tmp_path):
    expected = computed(trained(made.output, tmp_path / "trained"))
    assert not torch.equal(expected, logits(made.base))
    model = load(tmp_path / "trained")
    assert model.config.upscale == made.config["upscale"]
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(computed(tmp_path / "again"), expected)
    assert not (tmp_path / "again" / "upscale.json").exists()
    assert strip(tmp_path / "again", tmp_path / "stripped")["base_confirmed"] is True
    assert same_tensors(tmp_path / "stripped", made.base)
    assert config_of(tmp_path / "stripped") == config_of(made.base)


@of_each_method
def test_card_command_reproduces_the_model(made, command, tmp_path):
    usual = ("--base", made.base, "--max-shard-size", "40KB")
    done = command(*usual, *arguments_of(made.kind), "--output", tmp_path / "out", "--verify", "--json").succeeded()
    assert done.json()["parameters"] == made.report.to_dict()["parameters"]
    assert file_digests(tmp_path / "out", RECORD) == file_digests(made.output, RECORD)
    (tmp_path / "recipe.yaml").write_text(recipe_of(made.output))
    command(*usual, "--config", tmp_path / "recipe.yaml", "--output", tmp_path / "again", "--no-verify").succeeded()
    others = (*RECORD, "README.md")
    assert file_digests(tmp_path / "again", others) == file_digests(made.output, others)
    if made.report.measurements == []:  # others are timed
        card = (tmp_path / "again" / "README.md").read_text()
        for unchecked in (", as the method promises; nothing was compared", "; nothing was compared"):
            card = card.replace(unchecked, "")
        assert card == (made.output / "README.md").read_text()


SECOND = ["midus-hml", "midus-pkm", "midus-linear", "moc", "ultramem-v2", "moda", "hier-ffn", "hier-kv", "llama-pro"]
# A kind that is trained, and the one that is made of it: the second stands after every kind of the first.
STACKS = [
    *zip(SECOND, SECOND[4:] + SECOND[:4], strict=True),
    *(("hier-lora-ffn", "hier-lora-ffn"), ("solar", "llama-pro"), ("solar", "moc"), ("midus-hml", "solar")),
]


@pytest.mark.parametrize(("first", "second"), STACKS)
def test_second_method_keeps_what_the_first_trained(first, second, make, tmp_path):
    made, twice = make(first, FAMILY_OF[first]), tmp_path / "twice"
    once = trained(made.output, tmp_path / "once")
    inserted = any(entry["site"] == "inserted" for entry in made.config.get("memory", []))
    placing = {"placement": "3,7"} if second == "llama-pro" and inserted else {}
    report = upscale(base=once, output=twice, **KINDS[second], **placing)
    identical, expected = second not in DIFFERING, computed(once)
    assert (report.identity.max_abs_diff == 0.0) == torch.equal(computed(twice), expected) == identical
    inspected = inspect_checkpoint(twice)
    assert inspected["parameters"]["total"] == sum(p.numel() for p in load(twice).parameters())
    assert not torch.equal(computed(trained(twice, tmp_path / "acting")), expected)
    banks = file_digests(once / BANKS_FOLDER)
    for name in ("twice", "acting"):
        stripped = tmp_path / f"{name} stripped"
        assert strip(tmp_path / name, stripped)["base_confirmed"] is True
        assert same_tensors(stripped, once), name
        assert file_digests(stripped / BANKS_FOLDER) == banks, name
        assert (stripped / "config.json").read_bytes() == (once / "config.json").read_bytes(), name
    assert torch.equal(computed(tmp_path / "twice stripped"), expected)
    assert strip(tmp_path / "twice stripped", tmp_path / "bare")["base_confirmed"] is True
    assert same_tensors(tmp_path / "bare", made.base)
    assert not (tmp_path / "bare" / BANKS_FOLDER).exists()


@pytest.mark.parametrize("kind", [kind for kind in (*PLAIN, "moda, reused") if kind not in REQUESTS])
def test_verification_finds_nonzero_initial_values(kind, base, tmp_path, monkeypatch):
    """Values may be too small for any tolerance, or in blocks that are fetched."""

    def not_zero(layout, level, index, seed, dtype):
        return torch.full((layout.record_numel(level),), 0.01 if (level, index) == (3, 26) else 0.0, dtype=dtype)

    def initialised(tensor, *rest):
        return Fill(tensor.shape, value) if tensor.initial == ZEROS else honest(tensor, *rest)

    value, honest = 1e-6 if kind == "midus-hml" else 0.1, memory_methods.initialised
    monkeypatch.setattr("midus_hf.memories.hierarchical.bank.initial_block", not_zero)
    monkeypatch.setattr(memory_methods, "initialised", initialised)
    dtype = "bfloat16" if kind == "midus-linear" else "auto"
    with pytest.raises(VerificationError, match="expected a difference of exactly 0"):
        upscale(base=base, output=tmp_path / "out", dtype=dtype, **KINDS[kind])
    assert not list(tmp_path.iterdir())
