"""`strip` says whether what it gives back is the base, by a digest that the config of an upscaled model holds."""

import json

import pytest
import torch
from tiny import prompt
from transformers import Trainer, TrainingArguments

from tests.upscalers.checkpoints import (
    SMALL_MEMORY,
    config_of,
    content_digest,
    edit_config,
    load,
    read_tensors,
    record_of,
    save_base,
    unverified,
    write_tensors,
)
from upscalers.checkpoint import content_digest as digests
from upscalers.checkpoint.base_model import open_base
from upscalers.runs.inspection import inspect_checkpoint
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

WITHOUT_COUNT = (
    "upscale: warning: the weights are not the base's, byte for byte: trained since it was upscaled, or cast."
)
OLDER = "Its weights are not known to be the base's: it was upscaled before a digest of the base was recorded"


def recorded(folder):
    return config_of(folder)["upscale"].get("base_sha256")


def stripped(model, output):
    """What `strip` says of the weights, which its own record must say too."""
    result = strip(model, output)
    told = {key: result[key] for key in ("base_confirmed", "differing_tensors")}
    record = record_of(output)
    assert {key: record["stripped"][key] for key in told} == told
    return told["base_confirmed"], told["differing_tensors"]


def saved_again(folder, output, train=(), with_record=False, **kwargs):
    """The model as `save_pretrained` leaves it, after `train` moved parameters whose names begin so."""
    model = load(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(tuple(train)):
                parameter.add_(1)
    model.save_pretrained(output, **kwargs)
    if with_record:
        (output / "upscale.json").write_bytes((folder / "upscale.json").read_bytes())
    return output


def test_training_a_base_layer_is_found(family, shared_base, tmp_path):
    unverified(shared_base(family), tmp_path / "out")
    moved = "model.layers.2."
    count = sum(name.startswith(moved) for name in read_tensors(tmp_path / "out"))
    for with_record, expected in ((True, (False, count)), (False, (False, None))):
        folder = tmp_path / f"trained-{with_record}"
        saved_again(tmp_path / "out", folder, [moved], with_record)
        assert stripped(folder, tmp_path / f"stripped-{with_record}") == expected


def test_what_a_plain_trainer_saves_is_not_the_base(base, tmp_path):
    model = load(unverified(base, tmp_path / "out"))
    examples = [{"input_ids": row, "labels": row} for row in prompt()]
    arguments = TrainingArguments(
        str(tmp_path / "run"), max_steps=1, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=examples)
    trainer.train()
    trainer.save_model(str(tmp_path / "trained"))
    assert recorded(tmp_path / "trained") == recorded(tmp_path / "out") is not None
    assert stripped(tmp_path / "trained", tmp_path / "stripped") == (False, None)


def test_a_cast_base_is_not_the_base(family, shared_base, tmp_path):
    base = shared_base(family)
    unverified(base, tmp_path / "out", dtype="bfloat16")
    assert recorded(tmp_path / "out") == content_digest(read_tensors(base))
    assert stripped(tmp_path / "out", tmp_path / "stripped") == (False, len(read_tensors(base)))
    (tmp_path / "out" / "upscale.json").unlink()
    assert stripped(tmp_path / "out", tmp_path / "stripped-again") == (False, None)


def test_an_earlier_memory_that_was_trained_on_is_found(base, tmp_path):
    once = unverified(base, tmp_path / "once", placement="1,4")
    unverified(once, tmp_path / "twice", placement="0")
    saved_again(tmp_path / "twice", tmp_path / "trained", ["model.layers.2.memory.value_bank"], with_record=True)
    assert stripped(tmp_path / "trained", tmp_path / "stripped") == (False, 1)
    assert stripped(tmp_path / "stripped", tmp_path / "stripped-twice") == (True, 0)


def test_the_digest_is_of_the_weights_and_not_of_their_files(tmp_path):
    """Shards, a missing prefix, the copy of a tied head, and tensors that the architecture does not have."""
    base = save_base(tmp_path / "base", "gemma2")
    save_base(tmp_path / "sharded", "gemma2", max_shard_size="30KB")
    short = save_base(tmp_path / "short", "gemma2", prefix="")
    tensors = read_tensors(short)
    extra = {"layers.2.self_attn.rotary_emb.inv_freq": torch.arange(4.0), "steps": torch.arange(5)}
    write_tensors(short, {**tensors, **extra, "lm_head.weight": tensors["embed_tokens.weight"].clone()})
    found = {
        name: recorded(unverified(tmp_path / name, tmp_path / f"of-{name}")) for name in ("base", "sharded", "short")
    }
    assert set(found.values()) == {content_digest(read_tensors(base))}
    for name in found:
        saved_again(tmp_path / f"of-{name}", tmp_path / f"saved-{name}")
        assert stripped(tmp_path / f"saved-{name}", tmp_path / f"stripped-{name}") == (True, 0)


def test_the_digest_sees_every_bit_and_which_tensor_it_is_in(base, tmp_path):
    tensors = read_tensors(base)
    first, second = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (1, 2))
    norm = "model.layers.1.input_layernorm.weight"
    flipped = tensors[first].clone()
    flipped.view(torch.int32)[3, 4] ^= 1
    changed = {
        "as it is": {},
        "one bit": {first: flipped},
        "minus zero": {norm: torch.zeros_like(tensors[norm])},
        "zero": {norm: -torch.zeros_like(tensors[norm])},
        "another dtype": {norm: tensors[norm].bfloat16()},
        "swapped": {first: tensors[second], second: tensors[first]},
    }
    found = set()
    for name, changes in changed.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_bytes((base / "config.json").read_bytes())
        write_tensors(folder, {**tensors, **changes})
        found.add(recorded(unverified(folder, tmp_path / f"{name} upscaled", verify=False)))
    assert len(found) == len(changed)


def test_an_older_checkpoint_has_no_digest_and_this_is_said(command, base, tmp_path):
    unverified(base, tmp_path / "out")
    entry = config_of(tmp_path / "out")["upscale"]
    edit_config(tmp_path / "out", upscale={key: value for key, value in entry.items() if key != "base_sha256"})
    (tmp_path / "out" / "upscale.json").unlink()
    assert stripped(tmp_path / "out", tmp_path / "stripped") == (None, None)
    told = command("strip", tmp_path / "out", "--output", tmp_path / "again")
    assert (told.status, told.err) == (0, "")
    assert OLDER in " ".join(told.out.split())


@pytest.mark.parametrize("digest", ["", "0" * 64, 5, None, ["x"]])
def test_a_digest_that_was_tampered_with_confirms_nothing(base, tmp_path, digest):
    unverified(base, tmp_path / "out")
    entry = config_of(tmp_path / "out")["upscale"]
    edit_config(tmp_path / "out", upscale={**entry, "base_sha256": digest})
    assert stripped(tmp_path / "out", tmp_path / "stripped") == (False, None)


def test_a_record_of_other_tensors_counts_nothing(base, tmp_path):
    unverified(base, tmp_path / "out")
    saved_again(tmp_path / "out", tmp_path / "trained", ["model.layers.2."], with_record=True)
    record = record_of(tmp_path / "trained")
    record["base"]["tensor_sha256"]["norm.weight"] = "0" * 64
    (tmp_path / "trained" / "upscale.json").write_text(json.dumps(record))
    assert stripped(tmp_path / "trained", tmp_path / "stripped") == (False, None)


def test_the_command_says_which_it_is(command, base, tmp_path):
    unverified(base, tmp_path / "out")
    same = command("strip", tmp_path / "out", "--output", tmp_path / "same")
    assert (same.status, same.err) == (0, "")
    assert "Its weights are the base's, byte for byte." in " ".join(same.out.split())
    saved_again(tmp_path / "out", tmp_path / "trained", ["model.layers.2.mlp."], with_record=True)
    other = command("strip", tmp_path / "trained", "--output", tmp_path / "other")
    assert other.status == 0
    assert "Its weights are not the base's, byte for byte: 3 tensors differ." in " ".join(other.out.split())
    assert other.err.startswith("upscale: warning: 3 of 39 tensors are not the base's, byte for byte: trained since")
    (tmp_path / "trained" / "upscale.json").unlink()
    unknown = command("strip", tmp_path / "trained", "--output", tmp_path / "unknown", "--json")
    assert unknown.status == 0
    assert unknown.err.startswith(WITHOUT_COUNT)
    assert (unknown.json()["base_confirmed"], unknown.json()["differing_tensors"]) == (False, None)


def test_where_base_layers_are_left_out_nothing_is_digested(base, tmp_path):
    upscale(base=base, method="slices", output=tmp_path / "out", options={"slices": [{"layers": [0, 3]}]})
    assert recorded(tmp_path / "out") is None
    assert record_of(tmp_path / "out")["base"]["tensor_sha256"] == {}


def test_a_dry_run_reads_no_weights(base, tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("a dry run needs no digest")

    monkeypatch.setattr(digests.TensorDigests, "_digest", refuse)
    upscale(base=base, method="midus-hml", output=tmp_path / "out", options=SMALL_MEMORY, dry_run=True)


def test_inspect_tells_what_strip_did(command, base, tmp_path):
    once = unverified(base, tmp_path / "once")
    unverified(once, tmp_path / "twice", placement="0,4,8")
    strip(tmp_path / "twice", tmp_path / "back")
    strip(tmp_path / "back", tmp_path / "base-again")
    told = inspect_checkpoint(tmp_path / "base-again")
    assert told == {
        "model": str(tmp_path / "base-again"),
        "model_type": "llama",
        "num_layers": 4,
        "parameters": {"total": sum(tensor.numel() for tensor in read_tensors(base).values())},
        "stripped": {
            "model": "back", "method": "midus-hml", "removed_layers": [1, 4], "base_confirmed": True,
            "differing_tensors": 0,
        },
    }  # fmt: skip
    shown = command("inspect", tmp_path / "base-again")
    assert shown.status == 0
    words = (
        "stripped from",
        "back, upscaled with midus-hml; took out layers 1, 4",
        "its weights were the base's, byte for byte",
        "llama",
    )
    assert all(word in " ".join(shown.out.split()) for word in words)
    whole = inspect_checkpoint(tmp_path / "back")
    assert whole["stripped"]["removed_layers"] == [0, 4, 8] and len(whole["layers"]) == 6
    assert whole["base"] == "unknown: strip does not restore the record of the base"
    assert "twice, upscaled with midus-hml; took out layers 0, 4, 8" in " ".join(
        command("inspect", tmp_path / "back").out.split()
    )


def test_what_strip_noted_goes_no_further(base, tmp_path):
    strip(unverified(base, tmp_path / "out"), tmp_path / "stripped")
    unverified(tmp_path / "stripped", tmp_path / "again")
    for name in ("upscale.json", "config.json"):
        assert 'stripped": {' not in (tmp_path / "again" / name).read_text()
    assert recorded(tmp_path / "again") == recorded(tmp_path / "out")


def test_a_file_that_ends_early_is_an_error_and_leaving_stops_the_reading(base, tmp_path):
    short = save_base(tmp_path / "short")
    opened = open_base(short)
    names = digests.weight_names(opened)
    with digests.TensorDigests(opened.tensors, names) as started:
        found = started.finish()
    assert digests.content_sha256(found) == content_digest(read_tensors(short))
    with (short / "model.safetensors").open("r+b") as file:
        file.truncate(50_000)
    with (
        digests.TensorDigests(opened.tensors, names) as started,
        pytest.raises(OSError, match=r"model.safetensors ended \d+ bytes early"),
    ):
        started.finish()
    with pytest.raises(KeyboardInterrupt), digests.TensorDigests(opened.tensors, names) as started:
        started.begin()
        for name in names:
            started.add(name)
        raise KeyboardInterrupt
    assert all(future.done() for future in started._futures.values())


def test_tensors_wait_for_their_digest_only_while_memory_may_still_hold_them(base, monkeypatch):
    opened = open_base(base)
    names = digests.weight_names(opened)
    monkeypatch.setattr(digests, "_MOST_WAITING_BYTES", 20_000)
    with digests.TensorDigests(opened.tensors, names) as started:
        for name in [*names, *names, "unknown"]:
            started.add(name)
        waiting = set(names) - started._futures.keys()
        assert 0 < sum(opened.tensors[name].num_bytes for name in waiting) <= 20_000
        assert started._futures
        started.begin()
        assert set(started._futures) == set(names)
        assert digests.content_sha256(started.finish()) == content_digest(read_tensors(base))
