"""Runs that train blocks are killed between two steps and in the middle of saving: nothing that was saved is lost or altered."""

import json
import os
import signal
from pathlib import Path

import pytest
from pairs import by_default
from processes.warm import run_warm
from training.block_runs import assert_same_blocks, bank_of
from training.outcomes import assert_same_checkpoint, by_step, moved

from midus_hf.banks.memory_bank import MemoryBank
from midus_hf.training.checkpoints import checkpoints_in, damage_of

HELPER = Path(__file__).with_name("killed_runs.py")
STATE, BANK = "block_states/0", "memory_bank/hier-ffn"
# Where runs are killed, each a resumption of the one before it; those of a checkpoint are of the run that goes on from checkpoint 2.
STEP, MANIFEST = ("step", "", 3), ("os.rename", "checkpoint-4/.manifest.json.midus-partial", 1)
IN_A_CHECKPOINT = [
    *(("os.mkdir", "checkpoint-4", 1), ("os.mkdir", f"checkpoint-4/{STATE}", 1)),
    ("open", "checkpoint-4/trainer_state.json", 1),
]
REMOVAL = ("shutil.rmtree", "checkpoint-2", 1)
OF_THE_MODEL = [
    ("os.rename", f".partial_model/{BANK}/.level-1.safetensors.midus-partial", 1),
    ("os.rename", ".partial_model/memory_bank", 1),
]
KILLS = {
    "steps-and-checkpoints": by_default([STEP, MANIFEST], [STEP, *IN_A_CHECKPOINT, MANIFEST]),
    "the-end": by_default(OF_THE_MODEL, [REMOVAL, *OF_THE_MODEL]),
}


@pytest.fixture(scope="module")
def runs(fetching, assigned, tmp_path_factory):
    """A run that nobody disturbed, with all of its checkpoints, and those that were killed, each with what it left."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "recipe.yaml").write_text(
        f"corpus: {assigned}\npath_column: memory_ids\n"
        f"model_name_or_path: {fetching}\ntrainable: all\ngeneric_share: 0.3\n"
        "learning_rate: 1e-2\nsequence_length: 16\nper_device_train_batch_size: 4\nmax_steps: 6\n"
        "save_steps: 2\nbf16: false\nlogging_steps: 1\n"
    )

    def asked(output, *words, kill=None, copy=None):
        words = [str(folder / "recipe.yaml"), f"--output_dir={folder / output}", *words]
        return {"words": words, "output": str(folder / output), "kill": kill, "copy": copy and str(folder / copy)}

    list_ = [asked("whole", "--save_total_limit=null")]
    for name, kills in KILLS.items():
        for number, kill in enumerate(kills):
            resumes = f"--resume_from_checkpoint={'true' if number else 'false'}"
            list_.append(asked(name, resumes, kill=kill, copy=f"{name}-{number}"))
        list_.append(asked(name, "--resume_from_checkpoint=true"))
    roots = os.pathsep.join(map(str, HELPER.parents[2:4]))
    process = run_warm(HELPER.read_text(encoding="utf-8"), json.dumps(list_), PYTHONPATH=roots)
    assert process.returncode == 0, process.stderr
    expected = [-signal.SIGKILL if asked["kill"] else 0 for asked in list_]
    assert json.loads(process.stdout) == expected, process.stderr
    return folder


def complete_checkpoints(output: Path) -> list[int]:
    return sorted(step for step, folder in checkpoints_in(output).items() if damage_of(folder) is None)


@pytest.mark.parametrize("name", KILLS)
def test_what_is_gone_on_with_after_kills_is_the_run_that_nobody_disturbed(runs, name):
    assert moved(runs / name, runs / "whole") == set()
    assert_same_blocks(bank_of(runs / name), bank_of(runs / "whole"))
    for step in (4, 6):
        assert_same_checkpoint(runs / name / f"checkpoint-{step}", runs / "whole" / f"checkpoint-{step}")
        assert len(list((runs / name).glob(f"checkpoint-{step}/{STATE}/level-*"))) == 2
    assert set(complete_checkpoints(runs / name)) >= {4, 6}
    losses = by_step(runs / name, "loss")
    assert losses == by_step(runs / "whole", "loss") and len(losses) == 6
    assert not list((runs / name).rglob("*.midus-*")) and not list((runs / name).rglob(".partial*"))


@pytest.mark.parametrize("left", [f"{name}-{number}" for name in KILLS for number in range(len(KILLS[name]))])
def test_a_killed_run_leaves_whole_checkpoints_and_no_bank_that_is_not_whole(runs, left):
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
