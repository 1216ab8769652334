"""Where a run goes on from, and what it has to have in common with the run that wrote the checkpoint."""

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from midus_hf.files.checkpoint_files import CONFIG_FILE, RUN_CONFIG, TRAINER_STATE
from midus_hf.files.run_files import is_of_a_run
from midus_hf.training.output.run_checkpoints import (
    UNFINISHED,
    damage_of,
    is_of_earlier_version,
    missing_of_earlier_version,
    whole_checkpoint,
)
from midus_hf.training.run_options import AUTO, RunOptions

Options = TypeVar("Options", bound=RunOptions)

_FREE_ON_RESUME = (
    "output_dir",
    "output_on_failure",
    "activation_checkpointing",
    "save_steps",
    "save_total_limit",
    "logging_steps",
    "usage_steps",
    "eval_steps",
    "load_best_model_at_end",
    "early_stopping_patience",
    "max_seconds",
    "report_to",
    "resume_from_checkpoint",
    "overwrite_output_dir",
)
"""Options that may change between a run and its resumption: they do not touch what is computed."""

_OF_A_STEP = ("per_device_train_batch_size", "gradient_accumulation_steps")
"""Options that may change if a step takes as many sequences as it did."""


class StepSize(TrainerCallback, ExportableState):
    """Let checkpoints have the number of sequences that all processes together take in a step.

    Args:
        arguments: Of the run's Trainer.
    """

    def __init__(self, arguments: TrainingArguments):
        self.sequences = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size

    def state(self) -> dict[str, Any]:
        """What a checkpoint has of it."""
        return {"args": {}, "attributes": {"sequences": self.sequences}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # The Trainer brings up to date what is there: a checkpoint of a run that did not have it has nothing.
        callbacks: dict[str, Any] = state.stateful_callbacks  # type: ignore[assignment]  # a list only until it has been read
        callbacks.setdefault(type(self).__name__, self.state())


def settle_resumption(config: Options) -> Options:
    """The options of a run as this start of it means them: `resume_from_checkpoint: auto` is true or false.

    A run that torchrun starts again after one of its processes has died goes on as with `resume_from_checkpoint: auto`,
    unless the option names a checkpoint: what its own first start has written is neither in its way nor overwritten. What lay
    there before that is as it was for the first start, which may have been refused.

    Args:
        config: The options as they were given.

    Where checkpoints were written to their end and none is whole any more, `find_checkpoint` refuses: a run never begins again over
    what a person may want to repair.

    Raises:
        ValueError: If what lies in the output has no checkpoint and is another run's, or a trained model's.
    """
    restarted, output = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0, Path(config.output_dir)
    goes_on = restarted and isinstance(config.resume_from_checkpoint, bool) and not _is_of_before(output)
    if config.resume_from_checkpoint != AUTO and not goes_on:
        return config
    whole, passed_over = whole_checkpoint(output)
    if whole is not None or any(damage != UNFINISHED for damage in passed_over.values()):
        return dataclasses.replace(config, resume_from_checkpoint=True, overwrite_output_dir=False)
    # What died before its first checkpoint has left its options and the beginning of a log.
    has_died = is_of_a_run(output) and not (output / CONFIG_FILE).exists()
    if has_died and not config.overwrite_output_dir:
        _check_options(config, output, (), "choose another output_dir, or set overwrite_output_dir: true")
    return dataclasses.replace(
        config, resume_from_checkpoint=False, overwrite_output_dir=config.overwrite_output_dir or has_died
    )


def _is_of_before(output: Path) -> bool:
    """Whether the run in a folder was begun before torchrun started the one of this process for the first time."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # LAUNCH/attempt_N/RANK/error.json
    if not error_file:
        return False  # torchrun was told to keep no files
    try:
        return (output / RUN_CONFIG).stat().st_mtime < Path(error_file).parents[1].with_name(
            "attempt_0"
        ).stat().st_mtime
    except OSError:
        return False  # there is no run, or this machine has joined since


def find_checkpoint(config: RunOptions, skipped: Mapping[Path, str] | None = None) -> tuple[Path, dict[Path, str]]:
    """Return the checkpoint that a run is to be resumed from, and what is wrong with later ones.

    Args:
        config: The options of the run, with `resume_from_checkpoint`.
        skipped: Checkpoints that are not considered, and why. Default: none.

    Raises:
        ValueError: If there is none that is whole, or `resume_from_checkpoint` names one that is not. A checkpoint of a version
            that wrote no manifests is gone on from where `resume_from_checkpoint` names it, and passed over otherwise.
    """
    skipped = skipped or {}
    if isinstance(config.resume_from_checkpoint, str):
        checkpoint = Path(config.resume_from_checkpoint)
        look = missing_of_earlier_version if is_of_earlier_version(checkpoint) else damage_of
        damage = skipped.get(checkpoint) or look(checkpoint)
        if damage is not None:
            raise ValueError(
                f"resume_from_checkpoint is {config.resume_from_checkpoint!r}, which is no whole checkpoint ({damage}); expected a "
                "folder checkpoint-N with all that a run wrote there. Name another one, or set "
                "resume_from_checkpoint: true for the latest that is whole."
            )
        return checkpoint, {}
    checkpoint_or_none, passed_over = whole_checkpoint(config.output_dir, skipped)
    if checkpoint_or_none is not None:
        return checkpoint_or_none, passed_over
    passed_over = {**skipped, **passed_over}
    if all(damage == UNFINISHED for damage in passed_over.values()):
        raise ValueError(
            f"resume_from_checkpoint is true, but output_dir {config.output_dir!r} holds no complete checkpoint; "
            "start the run again with overwrite_output_dir: true, and save_steps to have checkpoints."
        )
    earlier = next(filter(is_of_earlier_version, passed_over), None)
    hint = (
        ""
        if earlier is None
        else f"resume_from_checkpoint: {earlier} goes on from that one with no more than a look for its files, or "
    )
    reasons = "; ".join(f"{path.name}: {damage}" for path, damage in passed_over.items())
    raise ValueError(
        f"output_dir {config.output_dir!r} holds no whole checkpoint ({reasons}); {hint}put back what is missing, "
        "or start the run again with resume_from_checkpoint: false and overwrite_output_dir: true."
    )


def tell_passed_over(passed_over: Mapping[Path, str]) -> None:
    """Let the main process tell a person, in one line on standard error, which checkpoints are passed over and why.

    This may be called before processes know of each other.

    Args:
        passed_over: What is wrong with each; nothing is told if there are none.
    """
    if passed_over and int(os.environ.get("RANK", 0)) == 0:
        reasons = (f"{path.name} is passed over: {damage}" for path, damage in passed_over.items())
        print("; ".join(reasons), file=sys.stderr, flush=True)


def check_same_run(config: RunOptions, checkpoint: Path) -> None:
    """Refuse options that differ from the checkpoint's run: its schedule and its data are those it began with.

    Args:
        config: The options of the run.
        checkpoint: To resume from.

    Raises:
        ValueError: If one differs, or the processes cannot take as many sequences in a step.
    """
    same_step = (
        _sequences_of(checkpoint)
        == config.per_device_train_batch_size * config.gradient_accumulation_steps * number_of_processes()
    )
    free = _OF_A_STEP if same_step else ()
    _check_options(config, checkpoint.parent, free, f"give the same, or start a new run with model: {checkpoint}")
    passes_of_a_step(config, checkpoint)


def passes_of_a_step(config: RunOptions, checkpoint: Path | None) -> int:
    """Forward passes of each process in a step: `gradient_accumulation_steps`, unless a run is resumed by more or fewer processes.

    Args:
        config: The options of the run.
        checkpoint: To resume from; None for a new run.

    Raises:
        ValueError: If no number of passes makes a step of as many sequences as it had.
    """
    sequences = None if checkpoint is None else _sequences_of(checkpoint)
    processes = number_of_processes()
    together = config.per_device_train_batch_size * processes
    if sequences is None or sequences == together * config.gradient_accumulation_steps:
        return config.gradient_accumulation_steps
    if sequences % processes:
        raise ValueError(
            f"a step of the run to resume takes {sequences:,} sequences, which {processes} processes cannot share; expected a "
            "number of processes that divides it."
        )
    if sequences % together:
        share = sequences // processes
        fits = max(size for size in range(1, config.per_device_train_batch_size + 1) if share % size == 0)
        raise ValueError(
            f"per_device_train_batch_size is {config.per_device_train_batch_size}, and a step of the run to resume takes "
            f"{sequences:,} sequences, {share:,} in each of {processes} processes; expected a per_device_train_batch_size that "
            f"divides these. Set per_device_train_batch_size to {fits}."
        )
    return sequences // together


def describe_resumption(config: RunOptions, checkpoint: Path | None, passes: int) -> list[str]:
    """What a person is told of where a run goes on, a sentence each.

    Args:
        config: The options of the run.
        checkpoint: To resume from; None for a new run.
        passes: As from `passes_of_a_step`.
    """
    if checkpoint is None:
        return []
    lines = [f"going on from {checkpoint}"]
    if passes != config.gradient_accumulation_steps:
        lines.append(
            f"gradient_accumulation_steps is {passes} in place of {config.gradient_accumulation_steps}, for as many sequences a step "
            "as before"
        )
    return lines


def number_of_processes() -> int:
    """How many processes share the run, by what launchers say: known before anything is set up."""
    return int(os.environ.get("WORLD_SIZE", 1))


def _sequences_of(checkpoint: Path) -> int | None:
    """Sequences that a step took in the run of a checkpoint; None if it was made before checkpoints had that."""
    callbacks: Any = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE)).stateful_callbacks
    step_size = callbacks.get(StepSize.__name__)
    return None if step_size is None else step_size["attributes"]["sequences"]


def _check_options(config: RunOptions, folder: Path, free: tuple[str, ...], remedy: str) -> None:
    """Refuse options that differ from those of the run in a folder, but for some more that are free."""
    record = folder / RUN_CONFIG
    if not record.exists():
        return
    before, now = yaml.safe_load(record.read_text(encoding="utf-8")), dataclasses.asdict(config)
    for values in (before, now):
        values["corpus"] = _without_cache(values.get("corpus"))
    for name, value in now.items():
        if name not in (*_FREE_ON_RESUME, *free) and name in before and before[name] != value:
            raise ValueError(f"{name} is {value!r}, but the run to resume has {before[name]!r}; {remedy}.")


def _without_cache(corpus: Any) -> Any:
    """What says which text is read: where its tokens are kept may change."""
    if isinstance(corpus, list):
        return [_without_cache(part) for part in corpus]
    if not isinstance(corpus, dict):
        return corpus
    # None is what an option is that was not there yet when the run began.
    return {key: value for key, value in corpus.items() if key != "cache_dir" and value is not None}
