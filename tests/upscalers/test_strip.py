"""`strip` gives the base back, byte for byte, and says by a digest whether it is the base."""

import json

import pytest
import torch

from tests.upscalers.checkpoints import SMALL_MEMORY, Recorder, edit_config, save_base, unverified, write_tensors
from tests.upscalers.contents import (
    config_of,
    content_digest,
    file_digests,
    layer,
    load,
    logits,
    read_tensors,
    record_of,
    same_tensors,
    tensor_files,
)
from tests.upscalers.methods import REQUESTS
from upscalers.checkpoint import safetensors_format as digests
from upscalers.checkpoint.base_checkpoint import open_base
from upscalers.runs.inspection import inspect_checkpoint
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale


def test_strip_restores_a_single_indexed_shard(tmp_path):
    base = save_base(tmp_path / "base")
    (base / "model.safetensors").rename(base / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(read_tensors(base), "model-00001-of-00001.safetensors")
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    strip(unverified(base, tmp_path / "out"), tmp_path / "stripped")
    assert [path.name for path in tensor_files(tmp_path / "stripped")] == ["model-00001-of-00001.safetensors"]
    assert torch.equal(logits(base), logits(tmp_path / "stripped"))


def test_resized_vocabulary_stays_and_is_warned_of(base, tmp_path):
    progress, model = Recorder(), load(unverified(base, tmp_path / "out"))
    model.resize_token_embeddings(140)
    model.save_pretrained(tmp_path / "resized")
    result = strip(tmp_path / "resized", tmp_path / "stripped", progress=progress)
    resized, differing = progress.warnings
    assert "the vocabulary was resized from 128 to 140 tokens" in resized
    assert "of another size" in differing
    assert result["base_confirmed"] is False
    assert config_of(tmp_path / "stripped")["vocab_size"] == 140
    tokens, result = torch.tensor([[5, 139, 6, 130, 7]]), load(tmp_path / "stripped")
    with torch.no_grad():
        assert torch.equal(result(tokens).logits, model.eval()(tokens).logits)  # new layers do nothing yet
        assert torch.equal(result(tokens % 128).logits[..., :128], load(base)(tokens % 128).logits)


def test_resized_base_is_upscaled_like_any_other(base, tmp_path):
    model = load(base)
    model.resize_token_embeddings(140)
    model.save_pretrained(tmp_path / "resized")
    report = upscale(base=tmp_path / "resized", method="midus-hml", output=tmp_path / "out", options=SMALL_MEMORY)
    assert report.identity.max_abs_diff == 0
    assert config_of(tmp_path / "out")["vocab_size"] == 140
    assert strip(tmp_path / "out", tmp_path / "stripped")["base_confirmed"]
    assert file_digests(tmp_path / "stripped", ("upscale.json",)) == file_digests(tmp_path / "resized")


def test_cast_tensors_stay_cast_and_are_warned_of(base, tmp_path):
    progress = Recorder()
    strip(unverified(base, tmp_path / "out", dtype="bfloat16"), tmp_path / "stripped", progress=progress)
    assert {tensor.dtype for tensor in read_tensors(tmp_path / "stripped").values()} == {torch.bfloat16}
    cast, differing = progress.warnings
    assert cast.startswith("the base was float32, and its tensors are bfloat16 since it was upscaled")
    assert differing.startswith("39 of 39 tensors are not the base's")
    assert "use the base's" in differing
    assert config_of(tmp_path / "stripped")["dtype"] == "bfloat16"


def test_tampered_record_decides_nothing(base, tmp_path):
    model, output = unverified(base, tmp_path / "in" / "out"), tmp_path / "in" / "stripped"
    record = record_of(model)
    names = record["base"]["files"]["model.safetensors"]
    elsewhere = ("../evil.safetensors", "/tmp/evil.safetensors", "config.json", "sub/model.safetensors")
    wrong = [
        *({name: names} for name in elsewhere), *({"model.safetensors": value} for value in (5, [["x"]])), [], None,
    ]  # fmt: skip
    tampered = [{**record, "base": {**record["base"], "files": files}} for files in wrong]
    for content in (*tampered, 5, {"base": 5}, {"base": {}}):
        (model / "upscale.json").write_text(json.dumps(content))
        told = [base.name] if content in tampered else [None, "unknown: upscale.json is gone"]
        assert inspect_checkpoint(model)["base"] in told
        strip(model, output, overwrite=True)
        assert [path.name for path in tensor_files(output)] == ["model.safetensors"]
        assert same_tensors(output, base)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    (model / "upscale.json").write_text("{")
    with pytest.raises(ValueError, match=r"upscale.json is not JSON .* Delete it"):
        strip(model, tmp_path / "again")


NOT_OF_THE_MODEL = (
    r"config\.json has a plan or new_memories .* not those of a model of 6 layers"
    r"|the config's upscale\.\w+ is .*; expected what upscale wrote\. Restore"
)
NEW_BEFORE, NEW_AFTER = {"previous": None, "next": 0, "sources": [0]}, {"previous": 2, "next": 3, "sources": [3]}
TAMPERED = [
    *(({"plan": plan}, NOT_OF_THE_MODEL) for plan in (None, [{"bas": 0}], [{"base": 0}, {"base": 1}])),
    *(({"base_config": config}, NOT_OF_THE_MODEL) for config in ([], {"num_hidden_layers": 2**40})),
    *(({"new_memories": names}, NOT_OF_THE_MODEL) for names in ([["x"]], ["x"])),
    ({"method": "vocabulary", "new_rows": [130, 131]}, "the method 'vocabulary', which this version lacks.* commit"),
    ({"plan": [{"base": 0}, NEW_AFTER, {"base": 1}, {"base": 2}, NEW_AFTER, NEW_AFTER]}, NOT_OF_THE_MODEL),
    ({"plan": [NEW_BEFORE, *({"base": i} for i in range(3)), NEW_AFTER, {"base": 3}]}, r"the base lacks \d+ tensors"),
]


def test_tampered_entry_is_refused(base, tmp_path):
    model = unverified(base, tmp_path / "out")
    sound = config_of(model)["upscale"]
    for entry, message in TAMPERED:
        edit_config(model, upscale={**sound, **entry})
        with pytest.raises(ValueError, match=message):
            strip(model, tmp_path / "stripped")
        assert not (tmp_path / "stripped").exists()


def test_inspect_shows_what_was_done(command, base, tmp_path):
    model = unverified(base, tmp_path / "out", placement="0,2,6", seed=7)
    tensors, inspected = read_tensors(model), command("inspect", model, "--json").json()
    assert inspected == inspect_checkpoint(model)
    assert (inspected["model"], inspected["seed"], inspected["trainable"]) == (str(model), 7, "new")
    for row in inspected["layers"]:
        assert row["parameters"] == sum(tensor.numel() for tensor in layer(tensors, row["index"]).values())
    words = ("k=2, query_norm=none", "inner_residual=false", "n=8", "new, between base 0 and base 1", "base 3")
    shown = command("inspect", model).out
    assert all(word in shown for word in words)
    for path in {*model.iterdir()} - {model / "config.json"}:
        path.unlink()
    assert inspect_checkpoint(model) == {**inspected, "base": "unknown: upscale.json is gone", "code": None}


def stripped(model, output):
    result = strip(model, output)
    report, record = {key: result[key] for key in ("base_confirmed", "differing_tensors")}, record_of(output)
    assert {key: record["stripped"][key] for key in report} == report
    return report["base_confirmed"], report["differing_tensors"]


def saved_again(folder, output, train=()):
    """Save a model again; with its record if training moved the parameters whose names begin so."""
    model = load(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(tuple(train)):
                parameter.add_(1)
    model.save_pretrained(output)
    if train:
        (output / "upscale.json").write_bytes((folder / "upscale.json").read_bytes())
    return output


def test_tampered_digest_confirms_nothing(base, tmp_path):
    model = unverified(base, tmp_path / "out")
    record, entry = record_of(model), config_of(model)["upscale"]
    for number, digest in enumerate(("0" * 64, 5)):
        edit_config(model, upscale={**entry, "base_sha256": digest})
        assert stripped(model, tmp_path / f"stripped-{number}") == (False, None)
    edit_config(model, upscale=entry)
    record["base"]["tensor_sha256"]["norm.weight"] = "0" * 64
    (model / "upscale.json").write_text(json.dumps(record))
    trained = saved_again(model, tmp_path / "trained", ["model.layers.2."])
    assert stripped(trained, tmp_path / "stripped") == (False, None)


def test_digest_is_independent_of_files(tmp_path):
    """Shards, a missing prefix, the copy of a tied head, and tensors that the architecture does not have."""
    base = save_base(tmp_path / "base", "gemma2")
    save_base(tmp_path / "sharded", "gemma2", max_shard_size="30KB")
    short = save_base(tmp_path / "short", "gemma2", prefix="")
    tensors, digest = read_tensors(short), content_digest(read_tensors(base))
    extra = {"layers.2.self_attn.rotary_emb.inv_freq": torch.arange(4.0), "steps": torch.arange(5)}
    write_tensors(short, {**tensors, **extra, "lm_head.weight": tensors["embed_tokens.weight"].clone()})
    for name in ("base", "sharded", "short"):
        model = unverified(tmp_path / name, tmp_path / f"of-{name}")
        assert config_of(model)["upscale"]["base_sha256"] == digest, name
        assert stripped(saved_again(model, tmp_path / f"saved-{name}"), tmp_path / f"stripped-{name}") == (True, 0)


def test_strip_command_reports_the_comparison(command, base, tmp_path):
    def run(model, *words):
        done = command("strip", model, "--output", tmp_path / "stripped", "--overwrite", *words).succeeded()
        return " ".join(done.out.split()), done.err, done

    model = unverified(base, tmp_path / "out")
    out, err, _ = run(model)
    assert "Its weights are the base's, byte for byte." in out
    assert err == ""
    trained = saved_again(model, tmp_path / "trained", ["model.layers.2.mlp."])
    out, err, _ = run(trained)
    assert "Its weights are not the base's, byte for byte: 3 tensors differ." in out
    assert err.startswith("upscale: warning: 3 of 39 tensors are not the base's, byte for byte")
    (trained / "upscale.json").unlink()
    _, err, done = run(trained, "--json")
    assert err.startswith("upscale: warning: the weights are not the base's, byte for byte")
    expected = {"base_confirmed": False, "differing_tensors": None, "removed_layer_indices": [1, 4]}
    assert expected.items() <= done.json().items()
    edit_config(model, upscale={k: v for k, v in config_of(model)["upscale"].items() if k != "base_sha256"})
    (model / "upscale.json").unlink()
    assert stripped(model, tmp_path / "once") == (None, None)
    out, err, _ = run(model)
    assert "Its weights are not known to be the base's: its config holds no digest" in out
    assert err == ""


def test_inspect_shows_what_was_stripped(command, base, tmp_path):
    once = unverified(base, tmp_path / "once")
    unverified(once, tmp_path / "twice", placement="0,4,8")
    strip(tmp_path / "twice", tmp_path / "back")
    strip(tmp_path / "back", tmp_path / "base-again")
    removed = {"method": "midus-hml", "removed_layers": [1, 4], "base_confirmed": True, "differing_tensors": 0}
    assert inspect_checkpoint(tmp_path / "base-again") == {
        "model": str(tmp_path / "base-again"), "model_type": "llama", "num_layers": 4,
        "parameters": {"total": sum(tensor.numel() for tensor in read_tensors(base).values())},
        "stripped": {"model": "back", **removed},
    }  # fmt: skip
    whole = inspect_checkpoint(tmp_path / "back")
    assert whole["stripped"]["removed_layers"] == [0, 4, 8]
    assert len(whole["layers"]) == 6
    assert whole["base"] == "unknown: strip does not restore the record of the base"
    for name, told in (
        ("base-again", "stripped from back, upscaled with midus-hml; took out layers 1, 4 its weights were the base"),
        ("back", "stripped from twice, upscaled with midus-hml; took out layers 0, 4, 8"),
    ):
        assert told in " ".join(command("inspect", tmp_path / name).out.split())


def test_digests_fail_on_a_short_file_and_stop(tmp_path):
    short = save_base(tmp_path / "short")
    opened = open_base(short)
    names, digest = opened.weight_names, content_digest(read_tensors(short))
    with digests.TensorDigests(opened.tensors, names) as started:
        assert digests.content_sha256(started.finish()) == digest
    with (short / "model.safetensors").open("r+b") as file:
        file.truncate(50_000)
    with (
        pytest.raises(OSError, match=r"model.safetensors ended \d+ bytes early"),
        digests.TensorDigests(opened.tensors, names) as started,
    ):
        started.finish()
    with pytest.raises(KeyboardInterrupt), digests.TensorDigests(opened.tensors, names) as started:
        for name in names:
            started.add(name)
        raise KeyboardInterrupt
    assert all(future.done() for future in started._futures.values())


FROM = {
    "stack": {2: "base 0, repeated", 3: "base 1, repeated", 6: "base 2, repeated"},
    "llama-pro": {2: "new, between base 1 and base 2, made from 1", 5: "new, beside base 3, made from 3"},
    "avg-deus": {2: "new, between base 1 and base 2, made from 1 and 2", 4: "new, between base 2 and base 3, made from 2 and 3"},
}  # fmt: skip


@pytest.mark.parametrize("method", FROM)
def test_inspect_shows_repeats_copies_and_fusions(method, base, tmp_path):
    upscale(base=base, method=method, output=tmp_path / "out", verify=False, **REQUESTS[method])
    rows = inspect_checkpoint(tmp_path / "out")["layers"]
    assert {row["index"]: row["from"] for row in rows if row["new"]} == FROM[method]
    assert all(row["from"].startswith("base ") for row in rows if not row["new"])


def test_strip_notes_files_that_are_not_compared(base, tmp_path, command):
    once = unverified(base, tmp_path / "once", method="hier-ffn", options={"sizes": [3, 2], "branching": 2})
    twice = unverified(once, tmp_path / "twice", method="llama-pro", options={})
    for model, told in ((twice, True), (once, False)):
        done = command("strip", model, "--output", tmp_path / f"stripped-{told}").succeeded()
        assert "are the base's, byte for byte" in done.out, told
        assert ("the files of hier-ffn next to the weights stay as they are now" in " ".join(done.err.split())) == told
