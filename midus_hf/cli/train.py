"""`midus train`, and how a run of it or of `midus sft` ends."""

import gc
import inspect
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

from midus_hf.cli.command_line import (
    FAILED,
    INTERRUPTED,
    WRONG_REQUEST,
    CommandExit,
    argument,
    command_line,
    run_command,
)
from midus_hf.config.errors import RequestError, first_line, is_first_to, is_main_process, print_note, shared_store
from midus_hf.files.outputs import as_disk_error
from midus_hf.sources.downloads import DownloadError, as_download_error

# For a command that passes its flags on to the parser of its keys.
WITH_FLAGS: dict[str, Any] = {"add_help_option": False, "context_settings": {"ignore_unknown_options": True}}
HELP = {"-h", "--help"}
_FAILURE_HERE = f"failure on machine {os.environ.get('GROUP_RANK', 0)}"

app = command_line()


@app.command(**WITH_FLAGS)
def midus_train(
    words: Annotated[list[str], argument("Texts or a recipe (.yaml), then keys.", "TEXTS|RECIPE [--KEY VALUE ...]")],
) -> None:
    """Train a model on text: upscaled, any other, or new.

    A new model starts from random weights (config_name). An upscaled model trains the parameters that its method names, unless
    trainable says otherwise. Recipes are in configs/train; a flag replaces the key of a recipe. midus train --help explains the
    keys.

    \b
    midus train TEXTS --model UPSCALED --output TRAINED
    midus train recipe.yaml --learning_rate 1e-3 --model UPSCALED --corpus TEXTS
    """
    if HELP & {*words}:
        from midus_hf.training.keys import TrainKeys

        print_keys(TrainKeys, midus_train, "transformers.TrainingArguments")
        return
    if "--help=all" in words:
        print_note("reading the Trainer's keys ...")  # takes seconds
    from midus_hf.training.arguments import TrainArguments

    if "--help=all" in words:
        print_keys(TrainArguments, midus_train)
    else:
        from midus_hf.training.run import run_training

        train_in_group(words, TrainArguments, run_training)


def print_keys(keys_class: Any, command: Any, others: str = "") -> None:
    """Print a command's docstring and keys, and, if these are only ours, whose keys `others` are."""
    from midus_hf.cli.run_arguments import RunParser

    end = (
        f"The keys of {others} work too, spelled as there, among them output_dir, per_device_train_batch_size, "
        f"gradient_accumulation_steps, max_steps and seed. midus {keys_class.command} --help=all lists all."
    )
    RunParser(keys_class, inspect.getdoc(command), end if others else None).print_help()


def train_in_group(words: Sequence[str], arguments_class: Any, run: Callable[[Any], Any]) -> None:
    """Read the arguments of a run, train, and print one line about the result.

    The process that fails first says why, whichever it is; what this does to others is not printed.
    """
    ending = _train(words, arguments_class, run)  # which raises none, since an exception would keep the trainer alive
    store = shared_store()  # others may still ask it who failed first
    if store is not None:
        sys.modules["torch.distributed"].destroy_process_group()
        # Cycles of trainer and model keep the group, and so its threads, alive. gloo threads that still release tensors can deadlock
        # with the garbage collector, so the pause lets them finish.
        time.sleep(0.5)
        gc.collect()
    if ending is not None:
        raise ending


def _train(words: Sequence[str], arguments_class: Any, run: Callable[[Any], Any]) -> CommandExit | None:
    """Read the arguments, run, and print the result; return how the command ends if the run failed."""
    from midus_hf.cli.run_arguments import read_arguments
    from midus_hf.sources.names import check_sources
    from midus_hf.training.output import MainProcessError, PartialSaveError
    from midus_hf.training.run import RunInterrupted
    from midus_hf.training.trainer import NotFiniteError

    try:
        arguments = read_arguments(arguments_class, words)
        check_sources(arguments.sources())
        result = run(arguments)
    except RunInterrupted as interrupted:
        return _exit_of_process(128 + interrupted.signal_number, str(interrupted))
    except KeyboardInterrupt:
        return _exit_of_process(INTERRUPTED, "interrupted")
    except (NotFiniteError, PartialSaveError) as error:
        return _exit_of_process(FAILED, str(error))
    except MainProcessError:
        return CommandExit(FAILED)
    except RequestError as error:
        return _exit_of_process(WRONG_REQUEST, str(error))
    except Exception as error:
        if isinstance(error.__cause__, RequestError | DownloadError):  # of what a step read
            return _exit_of_process(FAILED, str(error))
        if (told := as_disk_error(error) or as_download_error(error)) is not None:
            return _exit_of_process(FAILED, str(told))
        if shared_store() is not None and not is_first_to("failure"):
            return _exit_of_process(FAILED, "another process of the run failed, and says why on its machine")
        if "/gloo/" in str(error):  # the process at the other end said nothing
            killed = "another process of the run ended without a word, perhaps killed for its memory"
            return _exit_of_process(FAILED, f"{killed} ({first_line(error)}); see the log of its machine")
        is_first_to(_FAILURE_HERE)
        raise
    if is_main_process():
        loss = "" if result.loss is None else f", loss {result.loss:.4f}"
        print(f"{result.output}: {result.steps:,} steps, {result.tokens:,} tokens{loss}")
    return None


def _exit_of_process(status: int, line: str) -> CommandExit:
    """Return the ending of a process, with the reason unless a process of its machine failed before."""
    is_first_to("failure")
    return CommandExit(status, line if is_first_to(_FAILURE_HERE) else None, from_any_process=True)


main = partial(run_command, app, name="midus train", raises=True)
