"""The folder of a run: when it may be written, what can be resumed in it, and how the trained model lands there."""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from midus_config.checkpoint_files import CHECKPOINT_NAME, CONFIG_FILE, PARTIAL_MODEL, RUN_CONFIG, TRAINER_STATE
from midus_config.fetched_blocks import BANK_DESCRIPTION
from midus_config.locks import Lock
from midus_config.whole_files import move_into_place, whole_file
from midus_config.wording import first_few
from midus_hf.training.output_lock import check_not_held, hold_output
from midus_hf.training.run_options import RunOptions
from midus_hf.training.written_files import foreign_files, remove_written

_NAMED = 5
"""Files that a message names."""

_FREE_ON_RESUME = (
    "output",
    "output_on_failure",
    "activation_checkpointing",
    "save_every",
    "keep_checkpoints",
    "log_every",
    "usage_every",
    "eval_every",
    "keep_best",
    "early_stop",
    "max_seconds",
    "report_to",
    "resume",
    "overwrite",
)
"""Options that may change between a run and its resumption: they do not touch what is computed."""


def check_output(config: RunOptions) -> Path | None:
    """See that the run may write its output; nothing is written yet.

    Returns:
        The checkpoint to resume from, or None for a new run.

    Raises:
        ValueError: If another run is writing the output, if it exists and is neither resumed nor overwritten, if it holds an input
            or lies in one, or if there is no checkpoint to resume from, or one of a different run.
    """
    output = Path(config.output)
    inputs = config.sources()
    _check_place("output", config.output, inputs)
    check_not_held(output)
    if config.output_on_failure is not None:
        _check_place("output_on_failure", config.output_on_failure, [*inputs, ("output", config.output)])
        if any(Path(config.output_on_failure).glob("*")):
            raise ValueError(
                f"output_on_failure is {config.output_on_failure!r}, which exists; choose another folder."
            )
    if config.resume:
        checkpoint = _find_checkpoint(config)
        _check_same_run(config, checkpoint)
        return checkpoint
    if output.exists() and any(output.iterdir()):
        if not config.overwrite:
            raise ValueError(_exists(config.output))
        if not (output / RUN_CONFIG).exists():
            raise ValueError(
                f"output is {config.output!r}, which no run of ours wrote: it has no {RUN_CONFIG}. "
                "Choose another folder, or remove it yourself."
            )
        foreign = foreign_files(output)
        if foreign:
            raise ValueError(
                f"output is {config.output!r}, which also holds what no run of ours wrote: "
                f"{first_few(foreign, _NAMED)}. Move that away, or choose another folder."
            )
    return None


def start_output(config: RunOptions) -> Lock | None:
    """Create the output, without what an earlier run wrote unless that is resumed, and record the options in it.

    The main process of a run does so.

    Args:
        config: One that `check_output` has seen.

    Returns:
        What holds the output until the run has ended; None where the file system has no locks.

    Raises:
        ValueError: If another run has begun to write the output since.
    """
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    lock = hold_output(output)
    if (output / RUN_CONFIG).exists() and not (config.resume or config.overwrite):
        raise ValueError(_exists(config.output))  # another run has come and gone since
    if config.overwrite:
        remove_written(output, output)
    remove_written(output, output / PARTIAL_MODEL)
    with whole_file(output / RUN_CONFIG) as partial:
        partial.write_text(as_yaml(config), encoding="utf-8")
    return lock


def _exists(output: str) -> str:
    return f"output is {output!r}, which exists; choose another, or set resume or overwrite: true."


def as_yaml(config: RunOptions) -> str:
    """The options of a run as a config file.

    Args:
        config: The options.
    """
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def last_checkpoint(output: str | os.PathLike) -> Path | None:
    """The latest checkpoint in `output` that was written to its end, or None."""
    complete = {step: path for step, path in checkpoints(output).items() if is_complete(path)}
    return complete[max(complete)] if complete else None


def checkpoints(output: str | os.PathLike) -> dict[int, Path]:
    """The checkpoints in `output` by their steps, those included that were not written to their end."""
    output = Path(output)
    return {
        int(match[1]): path
        for path in (output.iterdir() if output.is_dir() else ())
        if (match := CHECKPOINT_NAME.fullmatch(path.name)) and path.is_dir()
    }


def remove_old_checkpoints(output: str | os.PathLike, step: int, keep: int | None, best: int | None = None) -> None:
    """Remove checkpoints until `keep` are left: first those that are not whole or lie beyond `step`, then the oldest.

    What a person has put into one stays.

    Args:
        output: The folder of the run.
        step: Where the run is. A checkpoint beyond it is from before the run was resumed at an earlier one.
        keep: How many to keep; None for all.
        best: The step of one to keep beside these. Default: none.
    """
    if keep is None:
        return
    found = {number: path for number, path in checkpoints(output).items() if number != best}
    order = sorted(found, key=lambda number: (number <= step and is_complete(found[number]), number))
    for number in order[: max(len(order) - keep, 0)]:
        remove_written(output, found[number] / TRAINER_STATE)  # first: what is left if this ends here is no checkpoint
        remove_written(output, found[number])


def publish(partial: Path, output: Path, extra_files: Mapping[str, bytes]) -> None:
    """Move a model that was saved in `partial` to `output`, its config last: without one, no folder is a model.

    The config is on the disk after all else, whenever the power fails. Of folders that are replaced, such as those of banks, what a
    person put there stays.

    Args:
        partial: A folder inside `output`, gone afterwards.
        output: The folder of the run.
        extra_files: Contents, by name, of more files to put beside the model.
    """
    for name, content in extra_files.items():
        (partial / name).write_bytes(content)
    move_into_place(
        partial, output, last=(CONFIG_FILE, BANK_DESCRIPTION), clear=lambda folder: remove_written(output, folder)
    )


def _check_place(name: str, value: str, others: Iterable[tuple[str, str]]) -> None:
    """See that a folder can be made or written, and neither holds one of the others nor lies in it."""
    place = Path(value)
    if place.exists() and not place.is_dir():
        raise ValueError(f"{name} is {value!r}, a file; expected a folder.")
    ancestor = next(folder for folder in (place.absolute(), *place.absolute().parents) if folder.exists())
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK):
        raise ValueError(f"{name} is {value!r}, but {str(ancestor)!r} is no folder to write in; choose another.")
    for other_name, other in others:
        # What is no path is the id of a model or dataset; an output need not exist yet.
        if other_name != "output" and not Path(other).exists():
            continue
        for outer, inner, verb in ((place, Path(other), "holds"), (Path(other), place, "lies in")):
            if inner.resolve().is_relative_to(outer.resolve()):
                raise ValueError(
                    f"{name} is {value!r}, which {verb} the {other_name} {other!r}; choose another folder."
                )


def _find_checkpoint(config: RunOptions) -> Path:
    if isinstance(config.resume, str):
        checkpoint = Path(config.resume)
        if not is_complete(checkpoint):
            raise ValueError(
                f"resume is {config.resume!r}, which is no complete checkpoint; expected a folder checkpoint-N."
            )
        return checkpoint
    latest = last_checkpoint(config.output)
    if latest is None:
        raise ValueError(
            f"resume is true, but output {config.output!r} holds no complete checkpoint; "
            "start the run again with overwrite: true, and save_every to have checkpoints."
        )
    return latest


def is_complete(checkpoint: Path) -> bool:
    """Whether the file that a Trainer writes last is there and whole.

    Args:
        checkpoint: Its folder.
    """
    try:
        json.loads((checkpoint / TRAINER_STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def _check_same_run(config: RunOptions, checkpoint: Path) -> None:
    """Refuse options that differ from the checkpoint's run: its schedule and its data are those it began with."""
    record = checkpoint.parent / RUN_CONFIG
    if not record.exists():
        return
    before, now = yaml.safe_load(record.read_text(encoding="utf-8")), dataclasses.asdict(config)
    for values in (before, now):
        values["corpus"] = _without_cache(values.get("corpus"))
    for name, value in now.items():
        if name not in _FREE_ON_RESUME and name in before and before[name] != value:
            raise ValueError(
                f"{name} is {value!r}, but the run to resume has {before[name]!r}; give the same, or start a new run "
                f"with model: {checkpoint}."
            )


def _without_cache(corpus: Any) -> Any:
    """What says which text is read: where its tokens are kept may change."""
    if isinstance(corpus, list):
        return [_without_cache(part) for part in corpus]
    if not isinstance(corpus, dict):
        return corpus
    # None is what an option is that was not there yet when the run began.
    return {key: value for key, value in corpus.items() if key != "cache_dir" and value is not None}
