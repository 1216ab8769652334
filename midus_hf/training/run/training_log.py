"""The log of a run: a file with one JSON object per log event, each on a line."""

import json
import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from midus_hf.files.whole_files import whole_file
from midus_hf.training.output.saving import say


class TrainingLog(TrainerCallback):
    """Callback that writes every log event to a file; a resumed run continues the file at the step it resumes from.

    Events also fall on the steps that save a checkpoint, and on the last step, so that even a short run has a loss. A
    logged loss is the mean since the previous event; since events fall on checkpoints, a resumed run logs the same
    losses as an uninterrupted run.

    If the file cannot be written, as on a full disk, events wait until it can be, and a line on standard error says so.

    Args:
        path: Path of the file, in a folder that exists.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._waiting = ""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            kept_events = [event for event in read_log(self.path) if event["step"] <= state.global_step]
            text = "".join(json.dumps(event) + "\n" for event in kept_events)
            with whole_file(self.path) as partial:
                partial.write_text(text, encoding="utf-8")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if control.should_save or 0 < state.max_steps <= state.global_step:
            control.should_log = True

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            is_first_failure = not self._waiting
            self._waiting += json.dumps(state.log_history[-1]) + "\n"
            try:
                append_whole(self.path, self._waiting)
                self._waiting = ""
            except OSError as error:
                if is_first_failure:
                    say(f"{self.path} cannot be written: {error.strerror}. Its events wait until it can.")


def append_whole(path: Path, text: str) -> None:
    """Append text to a file completely or, if writing fails, not at all.

    Args:
        path: Path of the file, which is created if missing.
        text: Text to append, written in UTF-8.

    Raises:
        OSError: If the file cannot be written.
    """
    with path.open("ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        content = text.encode()
        try:
            while content:
                content = content[file.write(content) :]
        except OSError:
            file.truncate(size)
            raise


def read_log(path: str | os.PathLike) -> list[dict]:
    """Return the events of a log, without a last line that was cut short; `[]` if the file does not exist.

    Args:
        path: Path of the file that a `TrainingLog` writes.
    """
    path = Path(path)
    if not path.exists():
        return []
    whole_lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in whole_lines]
