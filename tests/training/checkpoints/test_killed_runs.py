"""Runs that train blocks are killed between two steps and in the middle of saving: nothing that was saved is lost or altered."""

import json
import signal
from pathlib import Path

import pytest
from processes.warm import run_warm
from training.outcomes import assert_same_blocks, assert_same_checkpoint, bank_of, by_step, moved
from training.tiny_run import write_recipe

from midus_hf.memories.hierarchical.bank import MemoryBank
from midus_hf.training.checkpoints import checkpoints_in, find_damage

STATE, BANK = "block_states/0", "memory_bank/hier-ffn"
# Where runs are killed, each a resumption of the one before it: after the third update of blocks, or before a file is renamed.
KILLS = {
    "steps-and-checkpoints": ["step", "checkpoint-4/.manifest.json.midus-partial"],
    "the-end": [f".partial_model/{BANK}/.level-1.safetensors.midus-partial", ".partial_model/memory_bank"],
}
# A process of its own, which imports everything once and computes nothing: each run is a fork of it that begins at once.
PROGRAM = """
import itertools, json, os, shutil, signal, sys, traceback
import midus_hf.training.run
from midus_hf.memories.hierarchical.training import TrainedBank
from midus_hf.cli.train import main

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def die_at(kill, output):
    step, updates = TrainedBank.step, itertools.count(1)

    def stepped(*arguments):
        step(*arguments)
        if kill == "step" and next(updates) == 3:
            die()

    TrainedBank.step = stepped
    sys.addaudithook(lambda event, told: event == "os.rename" and str(told[0]) == f"{output}/{kill}" and die())

endings = []
for words, output, kill, copy in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        status = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            die_at(kill, output)
            status = main(words)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    endings.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if copy:
        shutil.copytree(output, copy)
print(json.dumps(endings))
"""


@pytest.fixture(scope="module")
def runs(fetching, assigned, tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    options = {"trainable": "all", "generic_share": 0.3, "per_device_train_batch_size": 4, "save_steps": 2}
    recipe = write_recipe(folder, fetching, assigned, path_column="memory_ids", **options)

    def asked(output, resumes, kill=None, copy=None):
        words = [str(recipe), f"--output_dir={folder / output}", f"--resume_from_checkpoint={resumes}"]
        return words, str(folder / output), kill, copy and str(folder / copy)

    whole = asked("whole", "false")
    list_ = [([*whole[0], "--save_total_limit=null"], *whole[1:])]
    for name, kills in KILLS.items():
        resumes = ["false", *["true"] * len(kills)]
        list_ += [asked(name, resumes[number], kill, f"{name}-{number}") for number, kill in enumerate(kills)]
        list_.append(asked(name, "true"))
    process = run_warm(PROGRAM, json.dumps(list_))
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == [-signal.SIGKILL if kill else 0 for _, _, kill, _ in list_], process.stderr
    return folder


def complete_checkpoints(output: Path) -> list[int]:
    return sorted(step for step, folder in checkpoints_in(output).items() if find_damage(folder) is None)


@pytest.mark.parametrize("name", KILLS)
def test_killed_and_resumed_run_is_the_undisturbed_one(runs, name):
    assert moved(runs / name, runs / "whole") == set()
    assert_same_blocks(bank_of(runs / name), bank_of(runs / "whole"))
    for step in (4, 6):
        assert_same_checkpoint(runs / name / f"checkpoint-{step}", runs / "whole" / f"checkpoint-{step}")
        assert len(list((runs / name).glob(f"checkpoint-{step}/{STATE}/level-*"))) == 2
    assert set(complete_checkpoints(runs / name)) >= {4, 6}
    losses = by_step(runs / name, "loss")
    assert losses == by_step(runs / "whole", "loss")
    assert len(losses) == 6
    assert not list((runs / name).rglob("*.midus-*"))
    assert not list((runs / name).rglob(".partial*"))


@pytest.mark.parametrize("left", [f"{name}-{number}" for name in KILLS for number in range(len(KILLS[name]))])
def test_killed_run_leaves_complete_checkpoints_and_banks(runs, left):
    layout = bank_of(runs / "whole").layout
    for folder in (runs / left).rglob("hier-ffn"):
        if not (folder / "bank.json").exists():
            continue
        bank = MemoryBank(folder, layout)
        for level in layout.levels:
            for index in bank.written(level):
                bank.block(level, index)
            name = f"level-{level}.safetensors"  # a bank that opens has all of its blocks
            assert (folder / name).read_bytes() == (runs / "whole" / BANK / name).read_bytes()
    assert complete_checkpoints(runs / left)
    for step in complete_checkpoints(runs / left):
        assert_same_checkpoint(runs / left / f"checkpoint-{step}", runs / "whole" / f"checkpoint-{step}")
