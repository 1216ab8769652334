"""The output folder of a run: when it may be written, and how the trained model and its card get there."""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import yaml

from midus_hf.config.fetched_blocks import BANK_DESCRIPTION
from midus_hf.config.wording import first_few
from midus_hf.files.checkpoint_files import CONFIG_FILE, PARTIAL_MODEL, RUN_CONFIG
from midus_hf.files.locks import Lock, check_not_held, hold_output
from midus_hf.files.run_files import RUN_MARK, foreign_files, is_of_a_run, remove_written
from midus_hf.files.whole_files import move_into_place, whole_file
from midus_hf.training.output.resumption import check_same_run, find_checkpoint, settle_resumption, tell_passed_over
from midus_hf.training.run_options import RunOptions

# Largest number of files that a message lists.
_NAMED = 5


def check_output(config: RunOptions) -> Path | None:
    """Check that a run may write its output, and print which checkpoints the run passes over; nothing is written yet.

    Returns:
        The checkpoint to resume from, or None for a new run.

    Raises:
        ValueError: If another run is writing the output, if the output holds files and is neither resumed nor
            overwritten, if it holds an input or lies in one, if there is no checkpoint to resume from, or if the
            checkpoint is of a different run.
    """
    output = Path(config.output_dir)
    inputs = config.sources()
    _check_place("output_dir", config.output_dir, inputs)
    check_not_held(output)
    if config.output_on_failure is not None:
        _check_place("output_on_failure", config.output_on_failure, [*inputs, ("output_dir", config.output_dir)])
        if any(Path(config.output_on_failure).glob("*")):
            raise ValueError(
                f"output_on_failure is {config.output_on_failure!r}, which exists; choose another folder."
            )
    if config.resume_from_checkpoint:
        checkpoint, passed_over = find_checkpoint(config)
        tell_passed_over(passed_over)
        check_same_run(config, checkpoint)
        return checkpoint
    if output.exists() and any(output.iterdir()):
        if not config.overwrite_output_dir:
            raise ValueError(_exists(config.output_dir))
        _check_overwritable(output, config.output_dir)
    return None


def _check_overwritable(output: Path, name: str) -> None:
    if not is_of_a_run(output):
        has = (
            f"its {RUN_CONFIG} is not one that runs write"
            if (output / RUN_CONFIG).exists()
            else f"it has no {RUN_CONFIG}"
        )
        raise ValueError(
            f"output_dir is {name!r}, which no run of ours wrote: {has}. Choose another folder, or remove it yourself."
        )
    foreign = foreign_files(output)
    if foreign:
        raise ValueError(
            f"output_dir is {name!r}, which also holds what no run of ours wrote: {first_few(foreign, _NAMED)}. Move that away, or "
            "choose another folder."
        )


@contextlib.contextmanager
def made_for_nothing(output: Path) -> Iterator[None]:
    """Remove `output` and its parents, where they are new and empty, if the work inside the context fails."""
    new_folders = [folder for folder in (output, *output.parents) if not folder.exists()]
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # stops at the first folder that is not empty
            for folder in new_folders:
                folder.rmdir()
        raise


def start_output(config: RunOptions, requested: RunOptions, checkpoint: Path | None) -> Lock | None:
    """Create the output, record the options in it, and remove an earlier run's files unless that run is resumed.

    Only the main process of a run calls this.

    Args:
        requested: Options as the user gave them, before `settle_resumption`.
        checkpoint: Checkpoint to resume from, from `check_output`.

    Returns:
        The lock on the output until the run has ended; None where the file system has no locks.

    Raises:
        ValueError: If another run has begun to write the output since it was checked, or has left files there because
            of which this run would now start otherwise or resume from another checkpoint.
    """
    output = Path(config.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    lock = hold_output(output)
    if settle_resumption(requested) != config or (
        config.resume_from_checkpoint and find_checkpoint(config)[0] != checkpoint
    ):
        raise ValueError(
            f"output_dir is {config.output_dir!r}, which another run has written since this run checked it; start this run again "
            "to go on from the files that are there now, or choose another folder."
        )
    if (output / RUN_CONFIG).exists() and not (config.resume_from_checkpoint or config.overwrite_output_dir):
        raise ValueError(_exists(config.output_dir))  # another run has started and ended since the check
    if config.overwrite_output_dir and any(output.iterdir()):
        _check_overwritable(output, config.output_dir)  # checked again, now that the lock keeps other runs out
        remove_written(output, output)
    remove_written(output, output / PARTIAL_MODEL)
    write_options(output, config)
    return lock


def write_options(folder: Path, config: RunOptions) -> None:
    """Record the options of a run in a folder that the run writes; the record marks the folder as a run's."""
    with whole_file(folder / RUN_CONFIG) as partial:
        partial.write_text(RUN_MARK + as_yaml(config), encoding="utf-8")


def _exists(output: str) -> str:
    return f"output_dir is {output!r}, which exists; choose another, or set resume_from_checkpoint or overwrite_output_dir: true."


def as_yaml(config: RunOptions) -> str:
    """Return the options of a run as the YAML text of a config file."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def publish(partial: Path, output: Path, extra_files: Mapping[str, bytes]) -> None:
    """Move a model that was saved in `partial` to `output`, its config last: a folder without a config is no model.

    The config reaches the disk after all other files, even if the power fails. Folders of the model, such as banks, are
    replaced, but files that a user put there stay.

    Args:
        partial: A folder inside `output`, which is removed.
        extra_files: Contents, by name, of further files to put beside the model.
    """
    for name, content in extra_files.items():
        (partial / name).write_bytes(content)
    move_into_place(
        partial, output, last=(CONFIG_FILE, BANK_DESCRIPTION), clear=lambda folder: remove_written(output, folder)
    )


def _check_place(name: str, value: str, others: Iterable[tuple[str, str]]) -> None:
    """Check that a folder exists or can be made, is writable, and neither contains nor lies in one of the other paths."""
    folder_path = Path(value)
    if folder_path.exists() and not folder_path.is_dir():
        raise ValueError(f"{name} is {value!r}, a file; expected a folder.")
    ancestor = next(folder for folder in (folder_path.absolute(), *folder_path.absolute().parents) if folder.exists())
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK):
        raise ValueError(f"{name} is {value!r}, but {str(ancestor)!r} is no folder to write in; choose another.")
    for other_name, other in others:
        # A name that is no existing path is the id of a model or dataset; only an output need not exist yet.
        if other_name != "output_dir" and not Path(other).exists():
            continue
        for outer, inner, verb in ((folder_path, Path(other), "holds"), (Path(other), folder_path, "lies in")):
            if inner.resolve().is_relative_to(outer.resolve()):
                raise ValueError(
                    f"{name} is {value!r}, which {verb} the {other_name} {other!r}; choose another folder."
                )


def add_training(
    card: bytes, config: RunOptions, steps: int, tokens: int, loss: float | None, best_step: int | None = None
) -> bytes:
    """Append the section "Trained with" to a model card.

    The card shows only the last part of local paths, since cards are made to be shared.

    Args:
        card: The `README.md` of the model that was trained, in UTF-8.
        loss: Mean loss of the last log event; None if nothing was logged.
        best_step: Step whose model was saved, chosen by held-out text. Default: None, the last step.
    """
    final_loss = "not logged" if loss is None else f"{loss:.4f}"
    note_on_best_step = ""
    if best_step is not None and best_step != steps:
        text = f"the held-out text {name}" if (name := next(iter(config.eval_texts), "")) else "held-out text"
        note_on_best_step = f"\nThe weights are those after step {best_step:,}, where {text} was predicted best.\n"
    section = f"""

## Trained with

| steps | tokens | final loss |
|---|---|---|
| {steps:,} | {tokens:,} | {final_loss} |
{note_on_best_step}
```yaml
{as_yaml(config.to_share(_label))}```
"""
    return card.rstrip() + section.encode()


def new_card(config: RunOptions) -> bytes:
    """Return the card of a model made from a config, without the section on training; the card names no base."""
    assert config.config_name is not None
    metadata = yaml.safe_dump(
        {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["midus_hf"]}, sort_keys=False
    )
    text = f"""---
{metadata}---

# {Path(config.output_dir).name}

Trained from the beginning: the weights were made at random by seed {config.seed}, for the config `{_label(config.config_name)}`. The
model is based on no other.
"""
    return text.encode()


def _label(name: str) -> str:
    path = Path(name).expanduser()
    return path.resolve().name if path.exists() else name
