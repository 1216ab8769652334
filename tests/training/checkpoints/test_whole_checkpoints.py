"""A checkpoint is believed by its manifest: what is damaged costs none that is whole; and a run writes no folder but its own."""

import json
import os
import shutil
from pathlib import Path
from signal import SIGTERM
from types import SimpleNamespace
from unittest.mock import Mock

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from torch import nn
from training.outcomes import as_it_was_at, assert_same_checkpoint, assert_same_run, exact_log, flip, moved
from training.tiny_run import AtStep, PreparedRun, document, framing_tokenizer, refused, tiny_config
from transformers import TrainingArguments

from midus_hf.files.outputs import exclusive
from midus_hf.training import MemoryTrainer, checkpoints
from midus_hf.training.checkpoints import (
    digest_model,
    digest_rows,
    find_damage,
    find_latest_complete,
    remove_checkpoint,
    resume_hint,
)
from midus_hf.training.output import PartialSaveError
from midus_hf.training.run import RunInterrupted, run_training

OPTIONS = {"max_steps": 6, "save_steps": 2, "save_total_limit": None}


@pytest.fixture(scope="module")
def whole(upscaled, corpus, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("whole") / "out"
    run_training(tiny_config(upscaled("llama"), corpus, output, **OPTIONS))
    return output


@pytest.fixture
def output(whole, tmp_path) -> Path:
    return as_it_was_at(4, whole, tmp_path / "out")


@pytest.fixture
def resumed(config_for):
    return lambda **changes: config_for(**{**OPTIONS, "resume_from_checkpoint": "auto", **changes})


def without_digests(path: Path) -> None:
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({name: {"bytes": entry["bytes"]} for name, entry in manifest.items()}))


CONTENTS = "{} does not have the contents that were written"
WEIGHTS = "trained.safetensors"
DAMAGES = {
    "absent": (Path.unlink, "rng_state.pth", "{} is missing"),
    "flipped": (flip, "scheduler.pt", CONTENTS),
    "cut": (lambda path: os.truncate(path, path.stat().st_size // 2), WEIGHTS, "{} has "),
    "a-folder": (lambda path: (path.unlink(), path.mkdir()), "optimizer.pt", "{} has "),
    "unfinished": (Path.unlink, "manifest.json", "it was not completely written"),
    **{
        f"manifest-{number}": (lambda path, text=text: path.write_text(text), "manifest.json", "its {} is damaged")
        for number, text in enumerate(("", "{}", "[]", "[" * 100_000, '{"trainer_state.json": 3}'))
    },
    "manifest-without-digests": (without_digests, "manifest.json", "its {} is damaged"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_checkpoint_is_skipped(name, output, capsys):
    damage, file, reason = DAMAGES[name]
    damage(output / "checkpoint-4" / file)
    assert find_latest_complete(output) == output / "checkpoint-2"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"checkpoint-4 is skipped: {reason.format(file)}")


def test_hint_after_an_error_reads_no_checkpoint(output, monkeypatch):
    monkeypatch.delattr("midus_hf.training.checkpoints._sha256")
    os.truncate(output / "checkpoint-4" / WEIGHTS, 5)
    assert resume_hint(output) == f"--resume_from_checkpoint true continues from {output / 'checkpoint-2'}"


def test_resumption_skips_a_damaged_checkpoint_exactly(resumed, output, whole, capsys):
    flip(output / "checkpoint-4" / WEIGHTS)
    run_training(resumed())
    printed = capsys.readouterr()
    card = (output / "README.md").read_text()
    assert card.replace("resume_from_checkpoint: auto\n", "") == (whole / "README.md").read_text()
    assert card.count("## Trained with") == 1
    assert "\n| 6 | 192 | " in card
    assert printed.err.count("is skipped") == 1
    assert f"resuming from {output / 'checkpoint-2'}\n" in printed.out
    assert exact_log(output) == exact_log(whole)
    assert moved(output, whole) == set()
    for step in (4, 6):
        assert_same_checkpoint(output / f"checkpoint-{step}", whole / f"checkpoint-{step}")
    assert all(find_damage(output / f"checkpoint-{step}") is None for step in (2, 4, 6))


def test_a_run_that_died_in_its_first_checkpoint_starts_again(resumed, output, whole, tmp_path):
    shutil.rmtree(output / "checkpoint-4")
    (output / "checkpoint-2" / "manifest.json").unlink()
    (output / "checkpoint-2" / "left.bin").touch()
    with refused("'.*out' has no whole checkpoint; start the run again"):
        PreparedRun(resumed(resume_from_checkpoint=True))
    for path in output.iterdir():
        if path.name not in ("checkpoint-2", "train_config.yaml"):
            path.unlink()
    run_training(resumed())
    assert_same_run(output, whole)
    assert not (output / "checkpoint-2" / "left.bin").exists()
    for step in (2, 4, 6):
        shutil.rmtree(output / f"checkpoint-{step}")
    with refused(r"which holds README\.md, .*; choose another folder"):
        PreparedRun(resumed())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.5}, r"learning_rate is 0\.5, but the run to resume has 0\.01; give the same"),
        ({"trainable": "all"}, "trainable is 'all', but the run to resume has 'its default'"),
        ({"per_device_train_batch_size": 4}, "run to resume takes 2 sequences, .* this run 4; set gradient"),
        ({"resume_from_checkpoint": "checkpoint-4"}, r"not a whole checkpoint \(it was not completely .* for the latest whole"),
        ({"resume_from_checkpoint": "checkpoint-9"}, r"not a whole checkpoint \(it does not exist\)"),
        ({"resume_from_checkpoint": False}, "holds README.md, checkpoint-2, .*; choose another folder"),
    ],
)  # fmt: skip
def test_changed_or_damaged_runs_are_not_resumed(resumed, output, changes, message):
    (output / "checkpoint-4" / "manifest.json").unlink()
    if isinstance(name := changes.get("resume_from_checkpoint"), str):
        changes = {"resume_from_checkpoint": str(output / name)}
    with refused(message):
        PreparedRun(resumed(**changes))


def test_partly_removed_checkpoint_is_rejected(output, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(
            shutil, "rmtree", Mock(side_effect=KeyboardInterrupt)
        )  # which nothing catches, as little as SIGKILL
        remove_checkpoint(output / "checkpoint-4")
    assert find_damage(output / "checkpoint-4") == "it was not completely written"


def test_older_checkpoints_go_once_the_new_one_is_whole(resumed, output, monkeypatch):
    """With a limit of one, too: at every moment one is whole. Its step of as many sequences is made otherwise."""
    whole_ones, finish = [], checkpoints.finish_checkpoint

    def watched(folder):
        paths = checkpoints.checkpoints_in(output).values()
        whole_ones.append([path.name for path in paths if find_damage(path) is None])
        finish(folder)

    monkeypatch.setattr("midus_hf.training.trainer.finish_checkpoint", watched)
    run_training(resumed(save_total_limit=1, per_device_train_batch_size=1, gradient_accumulation_steps=2))
    assert whole_ones == [["checkpoint-4", "checkpoint-2"]]
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-6"]


# What full disks raise: Python, torch (which does not say why) and safetensors.
FULL_DISK = OSError(28, "No space left on device")
FULL_DISKS = {
    "trained": ("midus_hf.training.checkpoints.save_file", SafetensorError("I/O error: No space left on device (os error 28)")),
    "moments": ("torch.save", RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")),
    "other": ("torch.save", FULL_DISK),
    "log": ("transformers.trainer_callback.CallbackHandler.on_log", FULL_DISK),
}  # fmt: skip


@pytest.mark.parametrize("case", FULL_DISKS)
def test_full_disk_ends_a_run_without_partial_checkpoint(case, resumed, output, monkeypatch):
    function, error = FULL_DISKS[case]
    monkeypatch.setattr(function, Mock(side_effect=error))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: Mock(free=1000))
    where, needed = (output, "") if case == "log" else (output / "checkpoint-6", r"it needs about [\d.]+ MB, and ")
    facts = rf"{where} could not be written: No space left on device \({needed}{output} has 0\.0 MB free.*\)\. "
    with pytest.raises(PartialSaveError, match=rf"{facts}.* continues from {output}/checkpoint-4\."):
        run_training(resumed(logging_steps=1))
    assert not (output / "checkpoint-6").exists()


def test_a_checkpoint_of_the_model_alone_is_not_gone_on_from(config_for, output, whole, monkeypatch):
    alone = {**OPTIONS, "save_only_model": True}
    run = PreparedRun(config_for(**alone, output_dir=output.parent / "alone"))
    at_3 = lambda noted: noted or SIGTERM * (noted is not False and run.trainer.state.global_step == 3)  # noqa: E731
    monkeypatch.setattr(run.trainer, "largest", at_3)
    with pytest.raises(RunInterrupted, match="checkpoint-3 has only the trained parameters, by save_only_model"):
        run.execute()
    for resume in (True, "auto", str(output.parent / "alone" / "checkpoint-2")):
        with refused("checkpoint-[23] has no optimizer and no schedule, as save_only_model"):
            run_training(config_for(**alone, output_dir=output.parent / "alone", resume_from_checkpoint=resume))
    # Of a run that is over, nothing but what trained is read.
    done = run_training(config_for(**alone, output_dir=output.parent / "done"))
    shutil.rmtree(output.parent / "done")
    assert done.steps == 6


def test_random_state_of_other_processes_is_noted(resumed, output, capsys):
    (output / "checkpoint-4" / "rng_state.pth").rename(output / "checkpoint-4" / "rng_state_0.pth")
    (output / "checkpoint-4" / "manifest.json").unlink()
    checkpoints.finish_checkpoint(output / "checkpoint-4")
    run_training(resumed())
    assert "checkpoint-4 has the random numbers of another number of processes: those of" in capsys.readouterr().err


def test_finished_run_completes_a_killed_publication(resumed, output, whole, monkeypatch):
    replace = os.replace

    def killed(source, target):
        if Path(target) == output / "model.safetensors":
            raise KeyboardInterrupt
        replace(source, target)

    run_training(resumed())
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            run_training(resumed())
    assert not (output / "config.json").exists()
    assert run_training(resumed()).steps == 6
    assert_same_run(output, whole)
    assert not (output / ".partial_model").exists()


def test_two_runs_at_once_do_not_write_one_folder(config_for, tmp_path):
    busy = ValueError("busy")
    with exclusive(tmp_path / "out", busy), refused("'.*out' is being written by another run. Wait"):
        PreparedRun(config_for(max_steps=1, resume_from_checkpoint="auto"))
    assert not list((tmp_path / "out").iterdir())
    seen = []

    def try_to_write(model):
        with refused("busy"), exclusive(tmp_path / "out", busy):
            pass
        seen.append(model)

    run = PreparedRun(config_for(max_steps=1))
    run.trainer.add_callback(AtStep(1, try_to_write))
    run.execute()
    with exclusive(tmp_path / "out", busy):
        assert seen


class Classifier(nn.Linear):
    def forward(self, x, labels):
        logits = super().forward(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_a_model_of_any_kind_has_checkpoints(tmp_path):
    rows = [{"x": torch.full((4,), float(label)), "labels": torch.tensor(label)} for label in (0, 1)]
    arguments = TrainingArguments(str(tmp_path), max_steps=2, save_steps=1, report_to=[], use_cpu=True)
    MemoryTrainer(Classifier(4, 2), arguments, train_dataset=rows).train()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-2"}


ROWS = st.lists(
    st.tuples(st.lists(st.integers(0, 9), max_size=4), st.lists(st.integers(0, 9), max_size=4)), max_size=9
)


def dataset(rows):
    columns = {"input_ids": [row[0] for row in rows], "labels": [row[1] for row in rows]}
    features = datasets.Features({name: datasets.LargeList(datasets.Value("int32")) for name in columns})
    return datasets.Dataset.from_dict(columns, features=features)


@given(ROWS, ROWS, st.integers(0, 9))
def test_rows_digest_depends_only_on_content(rows, others, cut):
    digest = digest_rows(dataset(rows))
    assert (digest == digest_rows(dataset(others))) is (rows == others)
    in_parts = datasets.concatenate_datasets([dataset(rows[:cut]), dataset(rows[cut:])])
    assert digest_rows(in_parts) == digest
    doubled = [row for row in rows for _ in range(2)]
    chosen = dataset(doubled).select(range(0, len(doubled), 2))  # rows of a table with others between them
    assert digest_rows(chosen) == digest


def test_rows_of_text_have_digests_too():
    texts = datasets.Dataset.from_dict({"text": ["a", "b"], "tags": [["x"], []]})
    assert digest_rows(texts) == digest_rows(texts.select([0, 1])) != digest_rows(texts.select([1, 0]))


def test_a_model_has_the_digests_of_its_weights_and_settings():
    model, same = tiny_model("llama"), tiny_model("llama")
    saved, new = SimpleNamespace(model_name_or_path="model"), SimpleNamespace(model_name_or_path=None)
    same.load_state_dict(model.state_dict())
    digests = digest_model(model, saved)["model_name_or_path"]
    assert digest_model(same, saved) == {"model_name_or_path": digests}
    assert {*digests} == {"weights", "settings"}
    same.config.rope_parameters = {**same.config.rope_parameters, "rope_theta": 5.0}
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    of_weights, of_settings = (digest_model(each, saved)["model_name_or_path"] for each in (model, same))
    assert of_weights["weights"] != digests["weights"]
    assert of_weights["settings"] == digests["settings"]
    assert of_settings["weights"] == digests["weights"]
    assert of_settings["settings"] != digests["settings"]
    assert digest_model(same, new) == {"config_name": {"settings": of_settings["settings"]}}


@pytest.fixture
def own_inputs(upscaled, corpus, tmp_path):
    shutil.copytree(upscaled("llama"), tmp_path / "model")
    shutil.copytree(corpus, tmp_path / "texts")
    (tmp_path / "held_out.txt").write_text(document(40, 99))
    keys = {"max_steps": 2, "save_steps": 1, "eval_steps": 1, "eval_text": str(tmp_path / "held_out.txt")}
    return lambda **changes: tiny_config(
        tmp_path / "model", tmp_path / "texts", tmp_path / "out", **{**keys, "save_total_limit": None, **changes}
    )


def other_weights(folder: Path) -> None:
    tensors = load_file(folder / "model" / "model.safetensors")
    tensors["lm_head.weight"][0, 0] += 1  # a frozen one
    save_file(tensors, folder / "model" / "model.safetensors", metadata={"format": "pt"})


def other_settings(folder: Path) -> None:
    path = folder / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 0.5}))


def other_tokenizer(folder: Path) -> None:
    framing_tokenizer("<bos> $A").save_pretrained(folder / "model")


CHANGES = {
    "weights": (other_weights, "model_name_or_path is '.*model', whose weights are not those"),
    "settings": (other_settings, "model_name_or_path is '.*model', whose settings are not those"),
    "tokenizer": (other_tokenizer, "corpus is '.*texts', whose sequences of tokens are not those"),
    "texts": (lambda folder: (folder / "texts" / "003.txt").write_text(document(60, 77)), "corpus is '.*texts', whose sequences"),
    "held-out-text": (lambda folder: (folder / "held_out.txt").write_text(document(40, 77)), "eval_text is '.*held_out.txt', whose"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_changed_inputs_are_not_resumed_over(name, own_inputs, tmp_path):
    change, message = CHANGES[name]
    run_training(own_inputs(load_best_model_at_end=True))
    shutil.rmtree(tmp_path / "out" / "checkpoint-2")
    change(tmp_path)
    with refused(rf"{message}.* \(SHA-256 [0-9a-f]{{16}}, expected [0-9a-f]{{16}}\); put them back"):
        PreparedRun(own_inputs(load_best_model_at_end=True, resume_from_checkpoint=True))


def test_touched_or_unread_inputs_resume(own_inputs, tmp_path):
    whole = run_training(own_inputs())
    shutil.rmtree(tmp_path / "out" / "checkpoint-2")
    for path in [*tmp_path.glob("texts/*"), *tmp_path.glob("model/*")]:
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    (tmp_path / "texts" / "notes.doc").touch()
    (tmp_path / "model" / "README.md").write_text("---\n{}\n---\nanother card\n")
    (tmp_path / "held_out.txt").write_text(document(40, 77))
    again = run_training(own_inputs(resume_from_checkpoint=True))
    assert (again.steps, again.loss) == (whole.steps, whole.loss)
