"""Resumption: the checkpoint from which a run goes on, and the options that the run must keep."""

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
from midus_hf.training.output.run_checkpoints import UNFINISHED, damage_of, whole_checkpoint
from midus_hf.training.run_options import AUTO, RunOptions

Options = TypeVar("Options", bound=RunOptions)

# Options that may change when a run is resumed, because they do not change what is computed.
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

# Options that may change if a step still takes the same number of sequences.
_OF_A_STEP = ("per_device_train_batch_size", "gradient_accumulation_steps")


class StepSize(TrainerCallback, ExportableState):
    """Callback that stores in checkpoints how many sequences all processes together take in a step."""

    def __init__(self, arguments: TrainingArguments):
        self.sequences = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size

    def state(self) -> dict[str, Any]:
        """Return the state of this callback that a checkpoint stores."""
        return {"args": {}, "attributes": {"sequences": self.sequences}}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        # The Trainer only updates existing entries, and a new run has none for this callback.
        callbacks: dict[str, Any] = state.stateful_callbacks  # type: ignore[assignment]  # a list only until it has been read
        callbacks.setdefault(type(self).__name__, self.state())


def settle_resumption(config: Options) -> Options:
    """Return the options that this start of a run uses: `resume_from_checkpoint: auto` becomes true or false.

    If torchrun restarts a run after one of its processes died, the run resumes as with `resume_from_checkpoint: auto`,
    unless the option names a checkpoint: files of the run's first start neither block the restart nor are overwritten.
    Files older than the first start are treated as at the first start, which may have refused them.

    If checkpoints were written to their end but none is whole any more, `find_checkpoint` refuses later: a run never
    starts over where a user may want to repair a checkpoint.

    Raises:
        ValueError: If the output has no checkpoint, but the files of a run with other options.
    """
    restarted, output = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0, Path(config.output_dir)
    goes_on = restarted and isinstance(config.resume_from_checkpoint, bool) and not _is_of_before(output)
    if config.resume_from_checkpoint != AUTO and not goes_on:
        return config
    latest_whole, passed_over = whole_checkpoint(output)
    if latest_whole is not None or any(damage != UNFINISHED for damage in passed_over.values()):
        return dataclasses.replace(config, resume_from_checkpoint=True, overwrite_output_dir=False)
    # A run that died before its first checkpoint has left its options and the beginning of a log.
    has_died = is_of_a_run(output) and not (output / CONFIG_FILE).exists()
    if has_died and not config.overwrite_output_dir:
        _check_options(config, output, (), "choose another output_dir, or set overwrite_output_dir: true")
    return dataclasses.replace(
        config, resume_from_checkpoint=False, overwrite_output_dir=config.overwrite_output_dir or has_died
    )


def _is_of_before(output: Path) -> bool:
    """Return whether the run in a folder began before torchrun first started the run of this process."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # LAUNCH/attempt_N/RANK/error.json
    if not error_file:
        return False  # torchrun was told to keep no files
    first_start = Path(error_file).parents[1].with_name("attempt_0")
    try:
        return (output / RUN_CONFIG).stat().st_mtime < first_start.stat().st_mtime
    except OSError:
        return False  # the folder has no run, or this machine joined after the first start


def find_checkpoint(config: RunOptions, skipped: Mapping[Path, str] | None = None) -> tuple[Path, dict[Path, str]]:
    """Return the checkpoint from which a run resumes, and what is wrong with each later checkpoint.

    Args:
        skipped: Checkpoints that are not considered, and why. Default: None, no checkpoint is skipped.

    Raises:
        ValueError: If no checkpoint is whole, or `resume_from_checkpoint` names a checkpoint that is not whole.
    """
    skipped = skipped or {}
    if isinstance(config.resume_from_checkpoint, str):
        checkpoint = Path(config.resume_from_checkpoint)
        damage = skipped.get(checkpoint) or damage_of(checkpoint)
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
    reasons = "; ".join(f"{path.name}: {damage}" for path, damage in passed_over.items())
    raise ValueError(
        f"output_dir {config.output_dir!r} holds no whole checkpoint ({reasons}); put back what is missing, "
        "or start the run again with resume_from_checkpoint: false and overwrite_output_dir: true."
    )


def tell_passed_over(passed_over: Mapping[Path, str]) -> None:
    """Print, in the main process, one line on standard error that says which checkpoints are passed over and why, if any.

    This may be called before processes are connected.
    """
    if passed_over and int(os.environ.get("RANK", 0)) == 0:
        reasons = (f"{path.name} is passed over: {damage}" for path, damage in passed_over.items())
        print("; ".join(reasons), file=sys.stderr, flush=True)


def check_same_run(config: RunOptions, checkpoint: Path) -> None:
    """Refuse options that differ from the options of the checkpoint's run, since a run keeps its schedule and data.

    Raises:
        ValueError: If an option differs, or the processes cannot take as many sequences in a step as before.
    """
    same_step = (
        _sequences_of(checkpoint)
        == config.per_device_train_batch_size * config.gradient_accumulation_steps * number_of_processes()
    )
    free = _OF_A_STEP if same_step else ()
    _check_options(
        config, checkpoint.parent, free, f"give the same, or start a new run with model_name_or_path={checkpoint}"
    )
    passes_of_a_step(config, checkpoint)


def passes_of_a_step(config: RunOptions, checkpoint: Path | None) -> int:
    """Return the number of forward passes of each process in a step: `gradient_accumulation_steps` in a new run.

    If more or fewer processes resume a run from a checkpoint, the number changes so that a step takes as many sequences
    as before.

    Raises:
        ValueError: If no number of passes gives a step as many sequences as before.
    """
    sequences = None if checkpoint is None else _sequences_of(checkpoint)
    processes = number_of_processes()
    sequences_per_pass = config.per_device_train_batch_size * processes
    if sequences is None or sequences == sequences_per_pass * config.gradient_accumulation_steps:
        return config.gradient_accumulation_steps
    if sequences % processes:
        raise ValueError(
            f"a step of the run to resume takes {sequences:,} sequences, which {processes} processes cannot share; expected a "
            "number of processes that divides it."
        )
    if sequences % sequences_per_pass:
        share = sequences // processes
        largest_size = max(size for size in range(1, config.per_device_train_batch_size + 1) if share % size == 0)
        raise ValueError(
            f"per_device_train_batch_size is {config.per_device_train_batch_size}, and a step of the run to resume takes "
            f"{sequences:,} sequences, {share:,} in each of {processes} processes; expected a per_device_train_batch_size that "
            f"divides these. Set per_device_train_batch_size to {largest_size}."
        )
    return sequences // sequences_per_pass


def number_of_processes() -> int:
    """Return the number of processes that share the run; launchers put it into the environment before Python starts."""
    return int(os.environ.get("WORLD_SIZE", 1))


def _sequences_of(checkpoint: Path) -> int:
    """Return the sequences per step in a checkpoint's run."""
    callbacks: Any = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE)).stateful_callbacks
    return callbacks[StepSize.__name__]["attributes"]["sequences"]


def _check_options(config: RunOptions, folder: Path, free: tuple[str, ...], remedy: str) -> None:
    """Refuse options that differ from those recorded in a folder, if any, except `free` ones and `_FREE_ON_RESUME`.

    `remedy` is the end of the message, which says what to do.
    """
    record = folder / RUN_CONFIG
    if not record.exists():
        return
    recorded, requested = yaml.safe_load(record.read_text(encoding="utf-8")), dataclasses.asdict(config)
    for values in (recorded, requested):
        values["corpus"] = _without_cache(values.get("corpus"))
    for name, value in requested.items():
        if name not in (*_FREE_ON_RESUME, *free) and name in recorded and recorded[name] != value:
            raise ValueError(f"{name} is {value!r}, but the run to resume has {recorded[name]!r}; {remedy}.")


def _without_cache(corpus: Any) -> Any:
    """Return the options of a corpus that decide which text is read, without the folder of its tokens."""
    if isinstance(corpus, list):
        return [_without_cache(part) for part in corpus]
    if not isinstance(corpus, dict):
        return corpus
    # None is left out, since an option that is newer than the run has no entry in its record.
    return {key: value for key, value in corpus.items() if key != "cache_dir" and value is not None}
