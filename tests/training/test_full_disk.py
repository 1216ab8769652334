"""A disk that fills up costs a checkpoint at most: room is seen to before, and what was trained is kept after."""

import contextlib
import errno
import io
import itertools
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from pairs import by_default
from tiny import FAMILIES
from tokenizers import Tokenizer, models
from training.outcomes import assert_same_run, exact_log, moved, weights
from training.tiny_run import refused, save_upscaled, tiny_config
from transformers import AutoModelForCausalLM, modeling_utils

from midus_hf.cli.training.train import main
from midus_hf.training.output import disk_room
from midus_hf.training.output.disk_room import SaveError, room_needed, write_failure
from midus_hf.training.output.run_checkpoints import last_checkpoint
from midus_hf.training.run.callbacks import append_whole, read_log
from midus_hf.training.run.train import prepare, train


@pytest.fixture
def full(monkeypatch):
    """Folders whose disk is full: writing weights in one fails. `full.add(folder)` fills one up."""
    folders: set[Path] = set()
    honest = modeling_utils.safe_save_file

    def save_file(tensors, filename, metadata=None):
        if any(Path(filename).resolve().is_relative_to(folder.resolve()) for folder in folders):
            Path(filename).write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        honest(tensors, filename, metadata=metadata)

    monkeypatch.setattr(modeling_utils, "safe_save_file", save_file)
    return folders


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """The system's folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def free(monkeypatch, num_bytes: int) -> None:
    monkeypatch.setattr(disk_room, "free_bytes", lambda folder: num_bytes)


@pytest.mark.parametrize(
    ("family", "bf16"), by_default([("llama", True), ("qwen2", False)], itertools.product(FAMILIES, [False, True]))
)
def test_the_room_that_is_counted_is_the_room_that_is_taken(family, bf16, config_for, tmp_path):
    model = save_upscaled(family, tmp_path, dtype=torch.bfloat16)
    config = config_for(model=model, max_steps=4, save_steps=1, bf16=bf16)
    run = prepare(config)
    run.execute()
    checkpoint = tmp_path / "out" / "checkpoint-4"
    moments = torch.load(checkpoint / "optimizer.pt")["state"].values()
    held = [*weights(checkpoint).values()]
    held += [state[name] for state in moments for name in ("exp_avg", "exp_avg_sq")]
    saved = weights(tmp_path / "out").values()
    assert run.room.model == int(1.02 * sum(tensor.nbytes for tensor in saved))
    assert run.room.checkpoint == int(1.02 * sum(tensor.nbytes for tensor in held))
    assert (run.room.written, run.room.kept) == (3, 2)


@pytest.mark.parametrize(
    ("saves", "keep", "existing", "written", "kept"),
    [(0, 2, 0, 0, 0), (1, 2, 0, 1, 1), (9, 2, 0, 3, 2), (9, None, 0, 9, 9), (9, 2, 2, 1, 0), (9, 2, 1, 2, 1)],
)
def test_checkpoints_are_counted_at_the_worst_moment(saves, keep, existing, written, kept, tmp_path):
    model = torch.nn.Linear(10, 10)
    config = tiny_config(tmp_path, tmp_path, tmp_path, save_total_limit=keep)
    room = room_needed(model, {"weight": torch.bfloat16, "bias": torch.bfloat16}, config, saves, existing)
    assert (room.written, room.kept) == (written, kept)
    assert (room.model, room.checkpoint) == (int(220 * 1.02), int(3 * 440 * 1.02))
    assert room.peak == max(written * room.checkpoint, kept * room.checkpoint + room.model)


def test_deepspeed_writes_weights_once_more_and_copies_and_moments_in_float32(tmp_path):
    model = torch.nn.Linear(10, 10).to(torch.bfloat16)
    model.bias.requires_grad_(False)
    room = room_needed(model, {}, tiny_config(tmp_path, tmp_path, tmp_path), 1, by_deepspeed=True)
    assert (room.model, room.checkpoint) == (int(220 * 1.02), int((2 * 220 + 3 * 400) * 1.02))


def test_a_disk_without_room_is_refused_before_anything_is_written(config_for, tmp_path, monkeypatch):
    free(monkeypatch, 1000)
    config = config_for(save_steps=5)
    message = (
        r"the run needs \S+ MB on the disk of output_dir '.*out', for a model of \S+ MB and 3 checkpoints of \S+ MB, but "
        r"0\.001 MB are free there\. Save less often \(save_steps\), keep fewer \(save_total_limit\), or choose a folder "
        r"on another disk\."
    )
    with refused(message):
        train(config)
    with refused(r"for a model of \S+ MB, but .* Make room, or choose"):
        train(config_for())
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_cannot_be_saved_does_not_end_the_run(config_for, tmp_path, full, capsys):
    options = {"save_steps": 4, "max_steps": 12}
    train(config_for("whole", **options))
    full.add(tmp_path / "out" / "checkpoint-4")
    full.add(tmp_path / "out" / "checkpoint-12")
    train(config_for(**options))
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-8"]
    lines = [line for line in capsys.readouterr().err.splitlines() if "was not saved" in line]
    where = f"was not saved in {tmp_path / 'out'}: No space left on device."
    assert lines == [
        f"checkpoint-4 {where} There is none yet.",
        f"checkpoint-12 {where} The latest there is checkpoint-8.",
    ]
    assert_same_run(tmp_path / "out", tmp_path / "whole")


def test_an_optimizer_that_cannot_be_saved_costs_its_checkpoint_alone(config_for, tmp_path, monkeypatch):
    def fail(*args):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")

    monkeypatch.setattr("transformers.trainer.Trainer._save_optimizer_and_scheduler", fail)
    train(config_for(save_steps=4, max_steps=4))
    assert last_checkpoint(tmp_path / "out") is None and not list((tmp_path / "out").glob("checkpoint-*"))
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_failure_of_another_kind_while_saving_is_no_full_disk(config_for, monkeypatch):
    def fail(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("transformers.trainer.Trainer._save_optimizer_and_scheduler", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(config_for(save_steps=4, max_steps=4))


@pytest.mark.parametrize("named", [True, False], ids=["output_on_failure", "temporary"])
def test_a_model_that_does_not_fit_is_saved_elsewhere(named, config_for, tmp_path, full, temporary, capsys):
    train(config_for("whole"))
    full.add(tmp_path / "out")
    options = {"output_on_failure": str(tmp_path / "spare")} if named else {}
    result = train(config_for(**options))
    place = Path(result.output)
    assert place == tmp_path / "spare" if named else place.parent == temporary and place.name.startswith("out-")
    assert moved(place, tmp_path / "whole") == set()
    assert AutoModelForCausalLM.from_pretrained(place) and (place / "upscale.json").exists()
    assert not (tmp_path / "out" / "config.json").exists() and not list(tmp_path.rglob(".partial_model"))
    err = capsys.readouterr().err
    assert f"{tmp_path / 'out'}: No space left on device. What was trained is still in memory" in err
    move = f"cp -a {place}/. {tmp_path / 'out'}/ && rm -r {place}"
    assert f"The trained model is in {place}, not in {tmp_path / 'out'}." in err and move in err
    full.clear()
    assert os.system(move) == 0
    assert moved(tmp_path / "out", tmp_path / "whole") == set() and not place.exists()


def test_the_command_says_by_its_status_that_the_model_is_elsewhere(words, tmp_path, full, temporary, capsys):
    full.add(tmp_path / "out")
    words = [*words, "max_steps=2"]
    assert main(words) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{temporary / 'out-'}")
    full.add(temporary)
    assert main([*words, "overwrite_output_dir=true", "save_steps=1"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(
        f"midus train: the trained model could not be saved ({tmp_path / 'out'}: No space left on device; "
    )
    assert error.endswith("; no checkpoint was saved") and len(list(temporary.iterdir())) == 1


def test_where_nothing_has_room_the_latest_checkpoint_is_named(config_for, tmp_path, full, temporary, monkeypatch):
    run = prepare(config_for(save_steps=5, max_steps=12))
    full.add(tmp_path / "out" / ".partial_model")
    free(monkeypatch, 10)
    with pytest.raises(
        SaveError, match=r"no room for [\d,]+ bytes\); resume_from_checkpoint=true goes on from checkpoint-12"
    ):
        run.execute()
    assert not any(temporary.iterdir())


def test_at_a_terminal_it_waits_for_room(config_for, tmp_path, full, temporary, monkeypatch, capsys):
    full |= {tmp_path / "out", temporary}

    class Terminal(io.StringIO):
        def isatty(self):
            return True

        def readline(self):
            full.clear()
            return "\n"

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(disk_room.select, "select", lambda *arguments: ([sys.stdin], [], []))
    result = train(config_for())
    assert result.output == str(tmp_path / "out")
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert re.search(
        r"Make room for [\d,]+ bytes in .*out, then press Enter; Ctrl-C gives up", capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("out", "which holds the output"),
        ("out/spare", "which lies in the output"),
        ("file", "a file; expected a folder."),
        ("file/spare", "is no folder to write in; choose another."),
        ("used", "which exists; choose another folder."),
    ],
)
def test_a_spare_folder_is_checked_at_the_start(value, message, config_for, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "precious").touch()
    config = config_for(output_on_failure=str(tmp_path / value))
    with refused(f"output_on_failure is '.*', .*{re.escape(message)}"):
        train(config)
    assert not (tmp_path / "out").exists()


def test_a_spare_folder_has_room_for_the_model(config_for, tmp_path, monkeypatch):
    spare = tmp_path / "spare"
    monkeypatch.setattr(disk_room, "free_bytes", lambda folder: 10 if Path(folder) == spare else 10**12)
    with refused(r"on the disk of output_on_failure '.*spare', for a model of \S+ MB, but"):
        train(config_for(output_on_failure=str(spare)))


def test_events_wait_while_the_log_cannot_be_written(config_for, tmp_path, monkeypatch, capsys):
    calls = []

    def append(path, text):
        calls.append(text)
        if len(calls) in (2, 3):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append_whole(path, text)

    monkeypatch.setattr("midus_hf.training.run.callbacks.append_whole", append)
    train(config_for(max_steps=5))
    assert [event["step"] for event in exact_log(tmp_path / "out")] == [1, 2, 3, 4, 5]
    err = capsys.readouterr().err
    assert err.count("log.jsonl cannot be written: No space left on device. Its events wait until it can.") == 1


def test_a_line_is_added_whole_or_not_at_all(tmp_path):
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    path = tmp_path / "log.jsonl"
    append_whole(path, '{"step": 1}\n')
    child = os.fork()
    if not child:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
        with contextlib.suppress(OSError):
            append_whole(path, '{"step": 2}\n')
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert path.read_text() == '{"step": 1}\n' and read_log(path) == [{"step": 1}]


def long_tokenizer() -> Tokenizer:
    return Tokenizer(models.WordLevel({f"word{i}": i for i in range(2_000)}, unk_token="word0"))


def test_what_the_libraries_raise_on_a_full_disk_is_known(tmp_path):
    """A limit on the size of files fails as a full disk does."""
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    from safetensors.torch import save_file

    tensors = {"a": torch.zeros(100_000)}
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
            reasons = []
            last_bytes = {"a": torch.zeros(2_300)}  # of which the beginning fits
            for save, value in (
                (save_file, tensors),
                (torch.save, tensors),
                (torch.save, last_bytes),
                (lambda _, path: Path(path).write_bytes(b"x" * 20_000), tensors),
                (lambda _, path: long_tokenizer().save(path), tensors),
            ):
                try:
                    save(value, str(tmp_path / "file"))
                except Exception as error:
                    reasons.append(write_failure(error) or repr(error))
            cut_short = "a file could not be written to its end"
            known = ["File too large", cut_short, cut_short, "File too large", "File too large"]
            status = 0 if [reason.partition(" (")[0] for reason in reasons] == known else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert write_failure(ValueError("No space left on device")) is None
    shutil.rmtree(tmp_path)
