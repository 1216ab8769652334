"""Edits of chapters and shuffles: which rows they change and no other byte, and what they record."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import prompt

from tests.upscalers.checkpoints import edit_config, save_base, write_tensors
from tests.upscalers.contents import (
    config_of,
    file_digests,
    load,
    logits,
    read_tensors,
    record_of,
    same_bits,
    tensor_files,
)
from upscalers.checkpoint.safetensors_format import read_header
from upscalers.edits.checkpoint_edit import row_order, shuffle
from upscalers.runs.inspection import inspect_checkpoint
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

# C, T and the layers with a memory of the checkpoints.
CHAPTERS, TOKENS, LAYERS = 6, 4, (0, 1, 2, 3)
BANK = "model.memory_tables.chapters.0.bank"
# Options of a memory in all layers.
OPTIONS = {"memory_tokens": CHAPTERS * TOKENS, "chapters": CHAPTERS, "k": 2, "layers": list(LAYERS)}


def save_chapters(folder, dtype=torch.float32, sharded=False, prefix="model.", names=("chapters",), **changes) -> Path:
    """Attach memories with random values to a tiny Llama, `FOLDER-base`; only the last one is new."""
    base = save_base(folder.with_name(f"{folder.name}-base"), dtype=dtype, prefix=prefix)
    (base / "tokenizer.json").write_text("a tokenizer")
    request = {"options": {**OPTIONS, **changes}, "max_shard_size": "40KB" if sharded else "5GB", "verify": False}
    for name in names:
        output = folder if name == names[-1] else folder.with_name(f"{folder.name}-{name}")
        upscale(base=base, method="moc", output=output, **request)
        base = output
    give_values(base)
    return folder


def give_values(folder: Path, never_chosen: Sequence[int] = ()) -> None:
    """Give random values to all that memories have; no router chooses some chapters, if any."""
    generator = torch.Generator().manual_seed(0)
    for file in tensor_files(folder):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if "memor" in name:
                tensors[name] = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            if name.endswith("router_bias"):
                tensors[name][list(never_chosen)] = -1e6
        save_file(tensors, file, {"format": "pt"})


def rows(number: int) -> slice:
    return slice(number * TOKENS, (number + 1) * TOKENS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_chapters(tmp_path_factory.mktemp("chapters") / "model")


TWO = ("chapters", "chapters-2")
# The names of a layer's router, weight and bias.
ROUTERS = [tuple(f"model.layers.{i}.memories.chapters.router_{kind}" for kind in ("weight", "bias")) for i in LAYERS]
ONE_ZERO = [None, *range(1, CHAPTERS)]
BANKS_OF_LAYERS = tuple(f"model.layers.{layer}.memories.chapters.bank" for layer in LAYERS)


@dataclass(frozen=True)
class Edit:
    """A command without model and output, and what it makes of a model."""

    words: str
    order: list[int | None]  # for each chapter of the result the one that it was, None where its rows are zero
    routers: tuple[int, ...] = ()  # layers whose routers follow
    saved: dict[str, Any] = field(default_factory=dict)  # how the model differs from the usual
    banks: tuple[str, ...] = (BANK,)


EDITS = {
    "zero, bfloat16": Edit("zero --chapters 1,3-4", [0, None, 2, None, None, 5], saved={"dtype": torch.bfloat16}),
    "prune the shared one": Edit("prune --chapters 5,0", [1, 2, 3, 4], LAYERS, {"sharded": True}),
    "every bank": Edit("zero --chapters 0", ONE_ZERO, (), {"share": "none"}, BANKS_OF_LAYERS),
    "one memory": Edit("zero --chapters 0 --memory chapters-2", ONE_ZERO, (), {"names": TWO}, (BANK.replace(*TWO),)),
    "no prefix, down to k": Edit("prune --chapters 1-3", [0, 4, 5], LAYERS, {"prefix": ""}),
}


@pytest.mark.parametrize("name", EDITS)
def test_edit_moves_only_the_named_rows(tmp_path, edited, name):
    edit = EDITS[name]
    model, prefix = save_chapters(tmp_path / "model", **edit.saved), edit.saved.get("prefix", "model.")
    verb, *words = edit.words.split()
    output = edited(verb, model, *words)
    before, after = (
        {re.sub(rf"^{prefix}(?=.*memor)", "model.", key): tensor for key, tensor in read_tensors(folder).items()}
        for folder in (model, output)
    )
    of_routers = {router for layer in edit.routers for router in ROUTERS[layer]}
    assert before.keys() == after.keys()
    assert {key for key in before if not same_bits(before[key], after[key])} == {*edit.banks} | of_routers
    for key in edit.banks:
        zeros = torch.zeros_like(before[key][rows(0)])
        expected = [zeros if number is None else before[key][rows(number)] for number in edit.order]
        assert same_bits(after[key], torch.cat(expected)), key
    for key in of_routers:
        assert same_bits(after[key], before[key][edit.order]), key
    expected = config_of(model)["memory"]
    if verb == "prune":
        kept = len(edit.order)
        expected[0] |= {"chapters": kept, "memory_tokens": kept * TOKENS, "shared_chapters": edit.order.count(0)}
    assert config_of(output)["memory"] == expected
    places = [{file.name: set(read_header(file)) for file in tensor_files(folder)} for folder in (model, output)]
    assert places[0] == places[1]
    if "names" not in edit.saved:
        assert strip(output, tmp_path / "base")["base_confirmed"]
        whole, base = file_digests(tmp_path / "model-base"), file_digests(tmp_path / "base")
        assert base["model.safetensors"] == whole["model.safetensors"]
        assert config_of(tmp_path / "base") == config_of(tmp_path / "model-base")


# A line of a card that is no UTF-8, with the line end of another system before it.
NO_UTF8 = b"caf\xe9\r\n\xff"


def test_edits_are_recorded_and_other_files_copied(tmp_path, chapters, checkpoint, command):
    card, output = (checkpoint / "README.md").read_text(), tmp_path / "out"
    measured = card.replace("---\n", "---\nmodel-index:\n- name: measured before\n  results: []\n", 1)
    (checkpoint / "README.md").write_bytes(measured.encode() + NO_UTF8)
    report = chapters("zero", checkpoint, "--chapters", "1,2", "--output", tmp_path / "once", "--json").json()
    assert report.pop("seconds") > 0
    assert report.pop("bytes_written") > 0
    zeroed = {"command": "zero", "memories": ["chapters"], "chapters": "1-2", "chapters_before": 6}
    zeroed["chapters_after"] = 6
    assert report == {**zeroed, "model": str(checkpoint), "output": str(tmp_path / "once")}
    done = chapters("prune", tmp_path / "once", "--chapters", "4", "--output", output)
    assert "prune of chapters, chapters 4, chapters_before 6, chapters_after 5\n" in done.out
    pruned = {**zeroed, "command": "prune", "chapters": "4", "chapters_after": 5}
    edits = [{**edit, "version": version("midus-hf")} for edit in (zeroed, pruned)]
    assert config_of(output)["upscale"] == {**config_of(checkpoint)["upscale"], "edits": edits}
    unknown = {"identity": {"checked": None, "max_abs_diff": None}, "promises_identity": False}
    assert record_of(output) == {**record_of(checkpoint), "edits": edits, **unknown}
    before, _, after = (output / "README.md").read_bytes().partition(b"\n\n## Edits\n\n")
    after = after.decode()
    assert before == card.encode() + NO_UTF8
    assert after.splitlines()[2:] == [
        f"- zero of chapters, chapters 1-2, chapters_before 6, chapters_after 6 (midus_hf {version('midus-hf')})",
        f"- prune of chapters, chapters 4, chapters_before 6, chapters_after 5 (midus_hf {version('midus-hf')})",
    ]
    for name in ("tokenizer.json", "generation_config.json", "modeling_midus.py"):
        assert (output / name).read_bytes() == (checkpoint / name).read_bytes()
    assert {file.name for file in output.iterdir()} == {file.name for file in checkpoint.iterdir()}
    assert inspect_checkpoint(output)["edits"] == edits
    assert "edits" not in inspect_checkpoint(checkpoint)
    assert "edited zero of chapters, chapters 1-2" in " ".join(command("inspect", output).out.split())
    assert "edited: zero of chapters, chapters 1-2" in " ".join(chapters("list", output).out.split())


@pytest.mark.parametrize(("memory", "kept"), [("chapters", [5]), ("chapters-2", [6])])
def test_edit_of_base_memory_is_warned_of_and_stays(tmp_path, chapters, memory, kept):
    model = save_chapters(tmp_path / "model", names=TWO)
    done = chapters("prune", model, "--chapters", "4", "--memory", memory, "--output", tmp_path / "out")
    of_base = "midus edit: warning: some of the edited tensors belong to the base"
    assert done.status == 0
    assert done.err.startswith(of_base) == (memory == "chapters")
    record = config_of(tmp_path / "out")["upscale"]
    assert [entry["chapters"] for entry in record["base_config"]["memory"]] == kept


def test_memory_without_a_name_in_its_entry_is_edited(tmp_path, chapters):
    model = save_chapters(tmp_path / "model")
    (entry,) = config_of(model)["memory"]
    edit_config(model, memory=[{key: value for key, value in entry.items() if key != "name"}])
    assert chapters("prune", model, "--chapters", "4", "--output", tmp_path / "out").status == 0
    assert config_of(tmp_path / "out")["memory"][0]["chapters"] == entry["chapters"] - 1
    assert [edit["command"] for edit in inspect_checkpoint(tmp_path / "out")["edits"]] == ["prune"]


# Commands, what is said, and how the model differs from the usual.
REFUSED = [
    ("zero --chapters 6", "chapters is '6'; expected numbers from 0 to 5", {}),
    ("zero --chapters 2,1-3", "chapters is '2,1-3', which names 2 twice", {}),
    ("prune --chapters three", "chapters is 'three'; expected numbers and ranges such as 3,7-9", {}),
    ("prune --chapters 4-2", "chapters is '4-2'; expected numbers and ranges", {}),
    ("prune --chapters 1-4", "'1-4', which leaves 1 chapters to choose k = 2 of; expected k or more. Prune fewer", {}),
    ("zero --chapters 1 --memory other", "memory is 'other'; expected one of its chapter memories: ", {}),
    ("zero --chapters 1", "memories: chapters, chapters-2. Pass --memory NAME", {"names": TWO}),
    ("zero --chapters 1", "has no memory of type 'moc'", {"memory": []}),
]


@pytest.mark.parametrize(("words", "message", "changes"), REFUSED, ids=str)
def test_wrong_chapter_request_is_refused(tmp_path, refusal, words, message, changes):
    model = save_chapters(tmp_path / "model", names=changes.get("names", TWO[:1]))
    edit_config(model, **{key: value for key, value in changes.items() if key == "memory"})
    verb, *rest = words.split()
    assert message in refusal(verb, model, *rest)


def test_list_shows_norms_and_biases(tmp_path, chapters):
    model = save_chapters(tmp_path / "model", share="none", names=TWO)
    first, second = chapters("list", model, "--json").json()["memories"]
    assert chapters("list", model, "--memory", TWO[1], "--json").json()["memories"] == [second]
    expected = {"name": "chapters", "site": "behind-attention", "chapters": 6, "chapter_tokens": TOKENS, "k": 2}
    assert first.items() >= {**expected, "shared_chapters": 1}.items()
    assert [bank["layers"] for bank in first["banks"]] == [[layer] for layer in LAYERS]
    tensors, bank = read_tensors(model), first["banks"][1]
    norms = tensors[BANKS_OF_LAYERS[1]].double().norm(dim=1).view(6, TOKENS).mean(1)
    assert bank["row_norms"] == pytest.approx(norms.tolist())
    assert bank["router_biases"] == {"1": tensors[ROUTERS[1][1]].tolist()}
    shown = chapters("list", model).out
    assert "bank 1, read by layers 1" in shown
    kinds = [line.split()[:2] for line in shown.splitlines() if line.split()[1:2] in (["shared"], ["routed"])]
    assert kinds[:6] == [["0", "shared"], *([str(number), "routed"] for number in range(1, 6))]


def test_non_finite_chapters_stay_and_are_listed(tmp_path, chapters, edited):
    model = save_chapters(tmp_path / "model")
    tensors = read_tensors(model)
    tensors[BANK][0] = float("nan")
    write_tensors(model, tensors)
    after = read_tensors(edited("zero", model, "--chapters", "1"))
    assert same_bits(after[BANK][rows(0)], tensors[BANK][rows(0)])
    assert chapters("list", model, "--json").json()["memories"][0]["banks"][0]["row_norms"][0] is None
    assert "not finite" in chapters("list", model).out


SOME = {**OPTIONS, "chunk_size": 4, "layers": [0, 2, 3]}


def acting(folder, **changes):
    """Return the folder of a model whose memories have values, in float64."""
    base = save_base(folder / "base", dtype=torch.float64)
    upscale(base=base, method="moc", options={**SOME, **changes}, output=folder / "model", verify=False)
    give_values(folder / "model")
    return folder / "model"


@pytest.mark.parametrize("changes", [{}, {"share": "every:2"}], ids=str)
def test_edited_checkpoint_equals_edited_model(tmp_path, edited, changes):
    model = acting(tmp_path, **changes)
    loaded = load(model)
    with torch.no_grad():
        for name, tensor in loaded.named_parameters():
            if name.endswith(".bank"):
                tensor.view(CHAPTERS, -1)[[0, 3]] = 0
        assert torch.equal(loaded(prompt()).logits, logits(edited("zero", model, "--chapters", "0,3")))
    give_values(model, never_chosen=[3])
    pruned = logits(edited("prune", model, "--chapters", "3", output="pruned"))
    torch.testing.assert_close(pruned, logits(model), rtol=1e-10, atol=1e-10)


# A memory with a layer of its own, attached ones, and tables that layers share.
KINDS = {
    "inserted": ("midus-hml", {"n": 4, "k": 2}),
    "attached": ("ultramem-v2", {"n": 8, "k": 4}),
    "shared": ("ultramem-v2", {"n": 8, "k": 4, "share": "ring:2"}),
    "chapters": ("moc", {"memory_tokens": 12, "chapters": 6, "k": 2, "share": "every:1"}),
}


def is_table(name: str) -> bool:
    return name.endswith(("value_bank", "value_table", ".bank"))


@pytest.fixture(scope="module")
def make(shared_base, tmp_path_factory):
    """An upscaled checkpoint, as training leaves it: with values in its tables; read-only."""

    @cache
    def made(kind: str) -> Path:
        (method, options), folder = KINDS[kind], tmp_path_factory.mktemp("made") / "trained"
        upscale(base=shared_base("llama"), method=method, output=folder, options=options, verify=False)
        give_values(folder)
        return folder

    return made


def moved_rows(before: torch.Tensor, after: torch.Tensor) -> list[int]:
    """For each place of a table, the row that came to it."""
    result = [[int(match) for match in (before == row).all(-1).nonzero()] for row in after]
    assert all(len(matches) == 1 for matches in result)
    return [match for (match,) in result]


@pytest.mark.parametrize("kind", KINDS)
def test_shuffle_moves_every_row_of_values_only(kind, make, tmp_path, command):
    trained, output = make(kind), tmp_path / "out"
    done = command("shuffle", trained, "--output", output, "--seed", 5, "--json").json()
    before, after = read_tensors(trained), read_tensors(output)
    assert before.keys() == after.keys()
    orders = {}
    for name, tensor in before.items():
        if not is_table(name):
            assert torch.equal(after[name], tensor), name
            continue
        tables = zip(tensor.view(-1, *tensor.shape[-2:]), after[name].view(-1, *tensor.shape[-2:]), strict=True)
        orders.setdefault(name.rpartition(".")[0], []).extend(tuple(moved_rows(*pair)) for pair in tables)
    # Rows of one position stay together, such as pre-values with their values; tables of other layers have another order.
    assert all(len({*of_position}) == 1 for of_position in orders.values())
    different = {of_position[0] for of_position in orders.values()}
    assert len(different) == len(orders)
    assert (len(orders) > 1) == (kind in ("inserted", "attached"))
    for order in different:
        assert sorted(order) == list(range(len(order)))
        assert all(row != place for place, row in enumerate(order))
    assert not torch.equal(logits(output), logits(trained))
    tables = sum(map(is_table, before))
    assert (done["seed"], done["tables"], done["command"]) == (5, tables, "shuffle")
    config, record = config_of(output), record_of(output)
    (shuffled,) = config["upscale"].pop("edits")
    assert record["edits"] == inspect_checkpoint(output)["edits"] == [shuffled]
    assert (shuffled["seed"], shuffled["memories"]) == (5, done["memories"])
    assert record["identity"] == {"checked": None, "max_abs_diff": None}
    assert record["promises_identity"] is False
    assert config == config_of(trained)
    assert f"- shuffle of {done['memories'][0]}, seed 5, tables {tables}" in (output / "README.md").read_text()


@pytest.mark.parametrize("rows", [2, 3, 50])
def test_row_order_moves_every_row(rows):
    for seed in range(20):
        order = row_order(rows, seed)
        assert sorted(order.tolist()) == list(range(rows)), seed
        assert torch.equal(order, row_order(rows, seed))
        assert not (order == torch.arange(rows)).any(), seed
    assert rows < 50 or not torch.equal(order, row_order(rows, 20))


def test_shuffled_base_memory_is_warned_of_and_stays(make, tmp_path, command):
    method, options = KINDS["inserted"]
    upscale(base=make("attached"), method=method, output=tmp_path / "twice", options=options, verify=False)
    done = command("shuffle", tmp_path / "twice", "--output", tmp_path / "out", "--json").succeeded()
    assert done.json()["memories"] == ["ultramem", "midus-hml"]
    assert "the base that strip restores has the edit too" in done.err
    assert strip(tmp_path / "out", tmp_path / "stripped")["base_confirmed"] is False
    assert [one["memories"] for one in inspect_checkpoint(tmp_path / "stripped")["edits"]] == [["ultramem"]]


def test_shuffle_without_rows_of_values_is_refused(base, tmp_path):
    upscale(base=base, method="llama-pro", output=tmp_path / "dense", verify=False)
    upscale(base=base, method="midus-hml", output=tmp_path / "one", options={"n": 1, "k": 1}, verify=False)
    for folder in (tmp_path / "dense", tmp_path / "one", base):
        with pytest.raises(ValueError, match=r"has no table of values with a row for .*; expected a model with a"):
            shuffle(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
