"""Chapters leave one checkpoint as a file, and enter another one."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.upscalers.chapters.made import (
    CHAPTERS,
    HIDDEN,
    LAYERS,
    TOKENS,
    bank_name,
    router_names,
    rows,
    save_chapters,
)
from tests.upscalers.checkpoints import config_of, read_tensors, same_bits
from upscalers.chapters.chapter_file import DIGEST_KEY, seal


@pytest.fixture
def exported(tmp_path, chapters, checkpoint):
    """A file with chapters 4 and 2 of the checkpoint."""
    file = tmp_path / "two.safetensors"
    done = chapters("export", checkpoint, "--chapters", "4,2", "--output", file)
    assert done.status == 0, done.err
    return file


def check_places(model, output, places):
    """The model has chapters 4 and 2 of the other one in these places, and else what it had."""
    given, before, after = read_tensors(model.with_name("given")), read_tensors(model), read_tensors(output)
    names = [(bank_name(), TOKENS), *((name, 1) for layer in LAYERS for name in router_names(layer))]
    for name, size in names:
        for number in range(max(CHAPTERS, max(places) + 1)):
            source, of = (given, (4, 2)[places.index(number)]) if number in places else (before, number)
            found = after[name][number * size : (number + 1) * size]
            assert same_bits(found, source[name][of * size : (of + 1) * size].to(found.dtype)), (name, number)
    assert {name for name in before if not same_bits(before[name], after[name])} == {name for name, _ in names}


@pytest.fixture
def model(tmp_path, checkpoint):
    """Another checkpoint of the same sizes, beside the one that chapters are from."""
    (tmp_path / "given").symlink_to(checkpoint)
    return save_chapters(tmp_path / "model", seed=1)


def test_a_file_has_rows_routers_and_what_they_fit_and_nothing_else_is_left(exported, checkpoint):
    assert [path.name for path in exported.parent.iterdir()] == [exported.name]
    tensors, model = load_file(exported), read_tensors(checkpoint)
    assert same_bits(tensors.pop("bank"), torch.cat([model[bank_name()][rows(number)] for number in (4, 2)]))
    for layer in LAYERS:
        weight, bias = router_names(layer)
        assert same_bits(tensors.pop(f"layers.{layer}.router_weight"), model[weight][[4, 2]])
        assert same_bits(tensors.pop(f"layers.{layer}.router_bias"), model[bias][[4, 2]])
    assert not tensors
    with safe_open(exported, framework="pt") as file:
        told = json.loads(file.metadata()["midus_chapters"])
    assert (told["chapters"], told["chapter_tokens"], told["layers"]) == ([4, 2], TOKENS, list(LAYERS))
    assert (told["source"], told["hidden_size"], told["model_type"]) == ("model", HIDDEN, "midus_llama")
    assert told["memory"]["routing"] == "chunk"


def test_import_puts_chapters_where_they_were(tmp_path, chapters, model, exported):
    assert chapters("import", model, exported, "--output", tmp_path / "out").status == 0
    check_places(model, tmp_path / "out", (4, 2))


def test_import_puts_chapters_into_places(tmp_path, chapters, model, exported):
    assert chapters("import", model, exported, "--into", "1,5", "--output", tmp_path / "out").status == 0
    check_places(model, tmp_path / "out", (1, 5))
    before, after = (config_of(folder) for folder in (model, tmp_path / "out"))
    assert after["memory"] == before["memory"]
    (edit,) = after["upscale"]["chapter_edits"]
    assert (edit["command"], edit["chapters"], edit["file"]) == ("import", "1,5", "two.safetensors")


def test_import_appends_chapters_and_the_config_follows(tmp_path, chapters, model, exported):
    done = chapters("import", model, exported, "--append", "--output", tmp_path / "out")
    assert done.status == 0, done.err
    check_places(model, tmp_path / "out", (6, 7))
    (entry,) = config_of(tmp_path / "out")["memory"]
    assert (entry["chapters"], entry["memory_tokens"], entry["shared_chapters"]) == (8, 8 * TOKENS, 1)


def test_import_into_another_dtype_casts(tmp_path, chapters, checkpoint, exported):
    (tmp_path / "given").symlink_to(checkpoint)
    model = save_chapters(tmp_path / "model", torch.bfloat16, seed=1)
    assert chapters("import", model, exported, "--into", "0,3", "--output", tmp_path / "out").status == 0
    check_places(model, tmp_path / "out", (0, 3))


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_of_integers_go_with_their_scales(tmp_path, chapters, bits):
    file = tmp_path / "three.safetensors"
    for name, seed in (("given", 0), ("model", 1)):
        save_chapters(tmp_path / name, seed=seed, bank_bits=bits)
    assert chapters("export", tmp_path / "given", "--chapters", "3", "--output", file).status == 0
    assert chapters("import", tmp_path / "model", file, "--into", "1", "--output", tmp_path / "out").status == 0
    given, after = read_tensors(tmp_path / "given"), read_tensors(tmp_path / "out")
    for name in (bank_name() + "_integers", bank_name() + "_scales"):
        assert same_bits(after[name][rows(1)], given[name][rows(3)])


def test_one_bank_is_exported_and_imported(tmp_path, chapters):
    model = save_chapters(tmp_path / "model", share="every:2")
    file = tmp_path / "one.safetensors"
    assert chapters("export", model, "--chapters", "3", "--bank", "1", "--output", file).status == 0
    words = ("import", model, file, "--into", "0", "--bank", "0", "--output", tmp_path / "out")
    assert chapters(*words).status == 0
    before, after = read_tensors(model), read_tensors(tmp_path / "out")
    assert same_bits(after[bank_name(0)][rows(0)], before[bank_name(1)][rows(3)])
    for target, source in ((0, 2), (1, 3)):
        for name, of in zip(router_names(target), router_names(source), strict=True):
            assert same_bits(after[name][:1], before[of][3:4])
    assert same_bits(after[bank_name(1)], before[bank_name(1)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_tokens": 12}, "rows per chapter = 4; expected 2"),
        ({"bank_rank": 3}, "bank_rank = null; expected 3"),
        ({"bank_bits": 8}, "bank_bits = null; expected 8"),
        ({"bank_width": 16, "heads": 2}, "columns of the bank = 32; expected 16"),
        ({"share": "every:2"}, "layers = 4; expected 2"),
    ],
)
def test_sizes_that_differ_are_refused(tmp_path, chapters, refusal, exported, changes, message):
    model = save_chapters(tmp_path / "model", **changes)
    told = refusal("import", model, exported)
    assert f"two.safetensors has {message}, as bank 0 of memory 'chapters' has" in told


def save_again(exported, change):
    """Let the file have other tensors, and the digest of those."""
    with safe_open(exported, framework="pt") as file:
        told = file.metadata()
    tensors = {name: change(name, tensor) for name, tensor in load_file(exported).items()}
    save_file(tensors, exported, told | {DIGEST_KEY: "0" * 64})
    seal(exported)


def test_routers_of_another_width_are_refused(tmp_path, refusal, checkpoint, exported):
    save_again(exported, lambda name, tensor: tensor[:, :16].clone() if "weight" in name else tensor)
    told = refusal("import", checkpoint, exported)
    assert "two.safetensors has hidden_size = 16; expected 32, as bank 0 of memory 'chapters' has" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--into", "1"], "into is '1', which has length 1; expected 2, as many as two.safetensors has chapters"),
        (["--into", "1,6"], "into is '1,6'; expected numbers from 0 to 5"),
        (["--into", "1,2", "--append"], "into is '1,2' and append is given; expected one of them"),
    ],
)
def test_places_that_do_not_fit_are_refused(tmp_path, refusal, checkpoint, exported, words, message):
    told = refusal("import", checkpoint, exported, *words)
    assert message in told


def test_numbers_that_a_smaller_model_lacks_are_refused(tmp_path, refusal, exported):
    model = save_chapters(tmp_path / "model", chapters=4, memory_tokens=16)
    told = refusal("import", model, exported)
    assert "two.safetensors has chapter 4; expected numbers below 4, the model's chapters. Pass --into" in told


def test_one_bank_of_several_gets_no_more_chapters(tmp_path, chapters):
    model, file = save_chapters(tmp_path / "model", share="every:2"), tmp_path / "one.safetensors"
    done = chapters("export", model, "--chapters", "3", "--output", file)
    assert done.status == 2 and "memory 'chapters' has 2 banks; expected one of them to export from" in done.err
    assert chapters("export", model, "--chapters", "3", "--bank", "1", "--output", file).status == 0
    words = ("import", model, file, "--append", "--output", tmp_path / "out")
    done = chapters(*words, "--bank", "0")
    assert done.status == 2 and "bank is 0; expected no single bank to append to, since the 2 banks" in done.err
    assert chapters(*words).status == 0


def test_what_is_no_file_of_chapters_is_refused(tmp_path, chapters, checkpoint, exported):
    def refusal(file):
        done = chapters("import", checkpoint, file, "--output", tmp_path / "out")
        assert (done.status, done.err.count("\n")) == (2, 1)
        return done.err

    assert "is no file; expected one that 'midus edit export' wrote" in refusal(tmp_path / "absent")
    assert "model.safetensors holds no chapters; expected a file" in refusal(checkpoint / "model.safetensors")
    (tmp_path / "text").write_text("no tensors")
    assert "text is not a sound safetensors file" in refusal(tmp_path / "text")


@pytest.mark.parametrize(
    "change",
    [
        {"chapters": [4]},
        {"chapters": [4, 4]},
        {"chapters": [-1, 2]},
        {"chapters": []},
        {"chapter_tokens": 8},
        {"layers": [0]},
        {"layers": 0},
        {"memory": None},
        {"memory": {"bank_bits": 8}},
    ],
    ids=str,
)
def test_a_file_whose_words_are_not_its_tensors_is_refused(tmp_path, refusal, checkpoint, exported, change):
    with safe_open(exported, framework="pt") as file:
        told = json.loads(file.metadata()["midus_chapters"])
    save_file(load_file(exported), exported, {"midus_chapters": json.dumps({**told, **change})})
    told = refusal("import", checkpoint, exported)
    assert "has a description that does not fit its tensors" in told


@pytest.mark.parametrize("place", ["chapters", "source", "first number", "last number", "digest"])
def test_a_file_that_was_altered_is_refused(tmp_path, refusal, checkpoint, exported, place):
    content = exported.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    changed = {
        "chapters": content.replace(rb"[4, 2]", rb"[4, 3]"),
        "source": content.replace(rb"model\"", rb"mosel\""),
        "first number": content[:header] + bytes([content[header] ^ 1]) + content[header + 1 :],
        "last number": content[:-1] + bytes([content[-1] ^ 1]),
        "digest": content.replace(f'{DIGEST_KEY}":"'.encode(), f'{DIGEST_KEY[:-1]}7":"'.encode()),
    }[place]
    assert len(changed) == len(content) and changed != content
    exported.write_bytes(changed)
    told = refusal("import", checkpoint, exported)
    what = "has no digest" if place == "digest" else "is not what was exported: its digest differs"
    assert f"two.safetensors {what}; expected a file as 'midus edit export' writes it. Export it again." in told


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("where", ["bank", "layers.1.router_bias"])
def test_numbers_that_are_not_finite_are_refused(tmp_path, refusal, checkpoint, exported, where, value):
    def change(name, tensor):
        if name == where:
            tensor.view(-1)[-1] = value
        return tensor

    save_again(exported, change)
    told = refusal("import", checkpoint, exported)
    assert f"two.safetensors has numbers in {where} that are not finite (F32); expected finite ones alone" in told


def test_an_export_replaces_files_of_chapters_alone(tmp_path, chapters, checkpoint, exported):
    def export(file, *words):
        return chapters("export", checkpoint, "--chapters", "1", "--output", file, *words)

    assert f"output {exported} exists; pass --overwrite" in export(exported).err
    assert export(exported, "--overwrite").status == 0
    assert load_file(exported)["bank"].shape == (TOKENS, HIDDEN)
    (tmp_path / "mine.safetensors").write_text("mine")
    done = export(tmp_path / "mine.safetensors", "--overwrite")
    assert done.status == 2 and "holds no chapters, so --overwrite will not replace it" in done.err
    assert "expected a file that ends in .safetensors" in export(tmp_path / "file.bin").err
    assert "in a folder that does not exist; create it first" in export(tmp_path / "none" / "a.safetensors").err
