"""Signals end a run in order; resumed runs, also on streams, go on as if nothing had happened."""

import json
import re
import shutil
import signal
import time
from unittest.mock import Mock

import pytest
from pairs import by_default
from processes.warm import MIDUS, run_ranks
from training.outcomes import assert_resumes, assert_same_run, logged, moved
from training.tiny_run import (
    AtStep,
    PreparedRun,
    document,
    interrupted,
    refused,
    signal_at,
    write_corpus,
    write_recipe,
)

from midus_hf.cli.train import main
from midus_hf.training.checkpoints import find_latest_complete
from midus_hf.training.checkpoints import find_latest_complete as last_checkpoint
from midus_hf.training.run import run_training
from midus_hf.training.trainer import MemoryTrainer

# Ranks that are named hear SIGINT when they would update parameters for the third time.
INTERRUPTED = f"""
import itertools, os, signal, sys
from torch.optim.optimizer import register_optimizer_step_pre_hook

rank, count = sys.argv.pop(1), itertools.count(1)

def interrupt(*_):
    if next(count) == 3:
        signal.raise_signal(signal.SIGINT)

if rank in ("all", os.environ["RANK"]):
    register_optimizer_step_pre_hook(interrupt)
{MIDUS}
"""
HINT = "Stopping after this step, with a checkpoint; interrupt again to stop at once."


def test_interrupted_run_skips_evaluation_and_resumes_exactly(config_for, tmp_path):
    held_out = write_corpus(tmp_path / "held-out", 2)
    options = {"gradient_accumulation_steps": 2, "max_steps": 12, "eval_text": str(held_out)}
    run_training(config_for("whole", **options))
    run, measured = PreparedRun(config_for("parts", **options)), []
    run.trainer.evaluate = lambda *_, **__: measured.append(run.trainer.state.global_step) or {}
    stopped = interrupted(run, 7, signal.SIGTERM)
    assert not [step for step in measured if step >= 7]
    saved = tmp_path / "parts" / "checkpoint-7"
    assert str(stopped) == f"interrupted after step 7; --resume_from_checkpoint true continues from {saved}"
    assert stopped.signal_number == signal.SIGTERM
    assert last_checkpoint(tmp_path / "parts") == saved
    assert not (tmp_path / "parts" / "config.json").exists()
    run_training(config_for("parts", resume_from_checkpoint=True, **options))
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_a_signal_in_the_last_step_changes_nothing(config_for, tmp_path):
    run = PreparedRun(config_for(max_steps=3))
    run.trainer.add_callback(signal_at(3))
    assert run.execute().steps == 3
    assert (tmp_path / "out" / "config.json").exists()
    assert last_checkpoint(tmp_path / "out") is None


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_tells_how_to_go_on_and_has_no_traceback(number, status, words, tmp_path, monkeypatch, capfd):
    train = MemoryTrainer.train

    def signalled(trainer, checkpoint):
        trainer.add_callback(signal_at(3, number))
        return train(trainer, checkpoint)

    monkeypatch.setattr(MemoryTrainer, "train", signalled)
    assert main(words) == status
    saved, err = last_checkpoint(tmp_path / "out"), capfd.readouterr().err
    line = f"midus train: interrupted after step 3; --resume_from_checkpoint true continues from {saved}"
    assert saved.name == "checkpoint-3"
    assert err.splitlines()[-1] == line
    assert HINT in err
    assert "Traceback" not in err


def test_a_second_signal_stops_at_once(config_for, tmp_path):
    def signal_twice(model):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)  # a launcher that passes on what the terminal has sent already
        time.sleep(1.1)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("nothing stopped")

    run = PreparedRun(config_for())
    run.trainer.add_callback(AtStep(1, signal_twice))
    with pytest.raises(KeyboardInterrupt) as raised:
        run.execute()
    assert raised.type is KeyboardInterrupt
    assert last_checkpoint(tmp_path / "out") is None


def test_before_training_an_interruption_writes_nothing(words, tmp_path, monkeypatch):
    monkeypatch.setattr("midus_hf.training.prepare.load_for_training", Mock(side_effect=KeyboardInterrupt))
    assert main(words) == 130
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("rank", "hints"), by_default([("1", 0)], [("all", 1), ("1", 0)]))
def test_all_processes_stop_at_the_same_step(words, tmp_path, rank, hints):
    run = run_ranks(INTERRUPTED, rank, "train", *words)
    assert run.returncode == 130
    assert run.stderr.count(HINT) == hints
    saved = tmp_path / "out" / "checkpoint-3"
    assert last_checkpoint(tmp_path / "out") == saved
    assert run.stderr.count(f"interrupted after step 3; --resume_from_checkpoint true continues from {saved}") == 1
    assert {path.name for path in saved.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}


STREAM = {"streaming": True, "shuffle_buffer": 5}
# Dies when it would update parameters for the third time.
KILLED = f"""
import itertools, os, signal
from torch.optim.optimizer import register_optimizer_step_pre_hook

count = itertools.count(1)
register_optimizer_step_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL) if next(count) == 3 else None)
{MIDUS}
"""
# What may happen only to the second process: the program's lines there, and what is printed, once.
ALONE = {
    "a file is absent": ("sys.argv.append('--corpus=absent.txt')", "midus train: corpus is 'absent.txt', which does not exist"),
    "a file is broken": ("stream._TEXTS_AT_ONCE = 3", r"midus train: step \d failed: .*/3.jsonl.*line 2 is no JSON.* To continue, "),
    "its disk is full": ("stream.save_file = Mock(side_effect=OSError(28, os.strerror(28)))",
                         "midus train: .*could not be written: No space left on device"),
    "it is killed": ("stream.save_file = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)",
                     "midus train: another process of the run ended without a word"),
    "it has a bug": ("stream.save_file = None", "TypeError: 'NoneType' object is not callable"),
}  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    for number in range(4):
        texts = [document(10 + 3 * place, 9 * number + place) for place in range(9)]
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / f"{number}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def test_a_stream_in_order_trains_as_what_is_read_whole(config_for, rows, tmp_path, capsys):
    options = {"corpus": rows, "max_steps": 6, "gradient_accumulation_steps": 2, "eval_text": str(rows / "0.jsonl")}
    run_training(config_for("whole", train_sampling_strategy="sequential", **options))
    capsys.readouterr()
    run_training(config_for("streamed", streaming=True, shuffle_buffer=0, **options))
    assert "corpus: a stream of sequences of 16, in order; 6 steps (24 sequences)\n" in capsys.readouterr().out
    for name in ("loss", "grad_norm", "eval_loss"):
        assert logged(tmp_path / "streamed", name) == logged(tmp_path / "whole", name) != []
    assert moved(tmp_path / "whole", tmp_path / "streamed") == set()
    run_training(config_for("shuffled", **options, **STREAM))
    assert logged(tmp_path / "shuffled") != logged(tmp_path / "whole")


@pytest.mark.parametrize(("processes", "corpus"), [(1, "."), (2, "."), (2, "0.jsonl")])
def test_twice_killed_stream_resumes_exactly(processes, corpus, upscaled, rows, tmp_path):
    """Two processes have two files each, or every other text of one; a pass through it ends within the run."""
    recipe = write_recipe(tmp_path, upscaled("llama"), rows / corpus, max_steps=8, save_steps=2, **STREAM)

    def run(program, output, *words):
        words = [f"--output_dir={tmp_path / output}", *words]
        return run_ranks(program, "train", recipe, *words, processes=processes)

    whole = run(MIDUS, "whole")
    assert whole.returncode == 0, whole.stderr
    for resume in ("false", "true"):
        assert run(KILLED, "parts", f"--resume_from_checkpoint={resume}").returncode == -signal.SIGKILL
    assert find_latest_complete(tmp_path / "parts").name == "checkpoint-4"
    last = run(MIDUS, "parts", "--resume_from_checkpoint=true")
    assert last.returncode == 0, last.stderr
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    assert len(logged(tmp_path / "parts")) == 8


@pytest.mark.parametrize("event", ALONE)
def test_process_that_fails_alone_says_why_and_others_nothing(event, upscaled, rows, tmp_path):
    lines, message = ALONE[event]
    corpus = shutil.copytree(rows, tmp_path / "rows")
    if event == "a file is broken":
        (corpus / "3.jsonl").write_text('{"text": "w4"}\nw5\n')
    imports = "import os, signal, sys; from unittest.mock import Mock; from midus_hf.data import stream"
    program = f"{imports}\nif os.environ['RANK'] == '1': {lines}\n{MIDUS}"
    options = {"max_steps": 8, "save_steps": 2, "streaming": True, "shuffle_buffer": 0}
    recipe = write_recipe(tmp_path, upscaled("llama"), corpus, **options)
    run = run_ranks(program, "train", recipe, f"--output_dir={tmp_path / 'out'}")
    assert run.returncode, run.stderr
    assert len(re.findall(message, run.stderr)) == 1, run.stderr
    is_bug = event == "it has a bug"
    assert run.stderr.count("midus train: ") == (not is_bug), run.stderr
    assert run.stderr.count("Traceback") == is_bug, run.stderr


def test_rank_that_reads_its_few_texts_again_says_so_once(upscaled, rows, tmp_path):
    corpus = tmp_path / "rows"
    corpus.mkdir()
    shutil.copy(rows / "0.jsonl", corpus)
    (corpus / "1.jsonl").write_text(json.dumps({"text": document(20, 1)}) + "\n")
    recipe = write_recipe(tmp_path, upscaled("llama"), corpus, max_steps=20, streaming=True, shuffle_buffer=0)
    run = run_ranks(MIDUS, "train", recipe, f"--output_dir={tmp_path / 'out'}")
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("read once") == 1, run.stderr
    said = (
        r"rank 1 \(1 of 2 files\): all 1 texts of '.*/1.jsonl' .* 21 tokens in 2 sequences; .* Give files equal sizes"
    )
    assert re.search(said, run.stderr)


def test_a_stream_of_texts_with_paths_goes_on_exactly(blocks_for):
    assert_resumes(blocks_for, 3, generic_share=0.3, **STREAM)


def test_other_stream_or_process_count_is_not_resumed(config_for, rows, tmp_path):
    corpus = shutil.copytree(rows, tmp_path / "rows")
    options = {"corpus": corpus, "max_steps": 4, "save_steps": 2, "resume_from_checkpoint": "auto"}
    run_training(config_for(**options, **STREAM))
    with refused("'its default', but the run to resume has .*; give the same"):
        PreparedRun(config_for(**options))
    (corpus / "3.jsonl").write_text('{"text": "w4"}')
    with refused("corpus is '.*', whose sequences of tokens are not those"):
        PreparedRun(config_for(**options, **STREAM))
    (find_latest_complete(tmp_path / "out") / "stream-1.safetensors").touch()
    with refused("streams of 2 processes, and this run has 1; expected the same"):
        PreparedRun(config_for(**options, **STREAM))
