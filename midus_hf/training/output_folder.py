"""The folder of a run: when it may be written, what can be resumed in it, and how the trained model lands there."""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from transformers import (
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from midus_hf.training.options import TrainConfig

CONFIG_NAME = "train_config.yaml"
LOG_NAME = "log.jsonl"
PARTIAL_NAME = ".partial_model"

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_FREE_ON_RESUME = (
    "output",
    "activation_checkpointing",
    "save_every",
    "keep_checkpoints",
    "log_every",
    "usage_every",
    "report_to",
    "resume",
    "overwrite",
)
"""Options that may change between a run and its resumption: they do not touch what is computed."""


def check_output(config: TrainConfig) -> Path | None:
    """See that the run may write its output; nothing is written yet.

    Returns:
        The checkpoint to resume from, or None for a new run.

    Raises:
        ValueError: If the output exists and is neither resumed nor overwritten, if it holds an input or lies in one, or
            if there is no checkpoint to resume from, or one of a different run.
    """
    output = Path(config.output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"output is {config.output!r}, a file; expected a folder.")
    for name, value in (("model", config.model), *(("corpus", corpus.path) for corpus in config.corpora)):
        if not Path(value).exists():
            continue
        for outer, inner, verb in ((output, Path(value), "holds"), (Path(value), output, "lies in")):
            if inner.resolve().is_relative_to(outer.resolve()):
                raise ValueError(
                    f"output is {config.output!r}, which {verb} the {name} {value!r}; choose another folder."
                )
    if config.resume:
        checkpoint = _find_checkpoint(config)
        _check_same_run(config, checkpoint)
        return checkpoint
    if output.exists() and any(output.iterdir()):
        if not config.overwrite:
            raise ValueError(
                f"output is {config.output!r}, which exists; choose another, or set resume or overwrite: true."
            )
        if not (output / CONFIG_NAME).exists():
            raise ValueError(
                f"output is {config.output!r}, which no run of ours wrote: it has no {CONFIG_NAME}. "
                "Choose another folder, or remove it yourself."
            )
    return None


def start_output(config: TrainConfig) -> None:
    """Create the output, empty unless resumed, and record the options in it.

    Args:
        config: One that `check_output` has seen.
    """
    output = Path(config.output)
    if config.overwrite and output.exists():
        shutil.rmtree(output)
    shutil.rmtree(output / PARTIAL_NAME, ignore_errors=True)
    output.mkdir(parents=True, exist_ok=True)
    (output / CONFIG_NAME).write_text(as_yaml(config), encoding="utf-8")


def as_yaml(config: TrainConfig) -> str:
    """The options of a run as a config file.

    Args:
        config: The options.
    """
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


class SavesTokenizer(TrainerCallback):
    """Put the tokenizer beside every checkpoint.

    A Trainer that is given the tokenizer does so too, but also rewrites the special tokens in the model's config.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.tokenizer.save_pretrained(Path(str(args.output_dir), f"checkpoint-{state.global_step}"))


def last_checkpoint(output: str | os.PathLike) -> Path | None:
    """The latest checkpoint in `output` that was written to its end, or None."""
    output = Path(output)
    numbered = {
        int(match[1]): path
        for path in (output.iterdir() if output.is_dir() else ())
        if (match := _CHECKPOINT.fullmatch(path.name)) and _is_complete(path)
    }
    return numbered[max(numbered)] if numbered else None


def publish(partial: Path, output: Path, extra_files: Mapping[str, bytes]) -> None:
    """Move a model that was saved in `partial` to `output`, its config last: without one, no folder is a model.

    Args:
        partial: A folder inside `output`, gone afterwards.
        output: The folder of the run.
        extra_files: Contents, by name, of more files to put beside the model.
    """
    (output / "config.json").unlink(missing_ok=True)
    for name, content in extra_files.items():
        (partial / name).write_bytes(content)
    for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
        target = output / path.name
        if path.is_dir():
            shutil.rmtree(target, ignore_errors=True)
        else:
            with path.open("rb") as written:
                os.fsync(written.fileno())
        path.replace(target)
    partial.rmdir()


def _find_checkpoint(config: TrainConfig) -> Path:
    if isinstance(config.resume, str):
        checkpoint = Path(config.resume)
        if not _is_complete(checkpoint):
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


def _is_complete(checkpoint: Path) -> bool:
    """Whether the file that a Trainer writes last is there and whole."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def _check_same_run(config: TrainConfig, checkpoint: Path) -> None:
    """Refuse options that differ from the checkpoint's run: its schedule and its data are those it began with."""
    record = checkpoint.parent / CONFIG_NAME
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
    return {key: value for key, value in corpus.items() if key != "cache_dir"} if isinstance(corpus, dict) else corpus
