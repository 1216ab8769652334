"""The output folder of a run: its lock, and the record of the arguments."""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list

from midus_hf.config.errors import RequestError
from midus_hf.config.wording import first_few
from midus_hf.config.yaml_options import read_mapping, write_yaml
from midus_hf.files.checkpoint_files import CONFIG_FILE, RUN_CONFIG
from midus_hf.files.outputs import atomic_write, exclusive
from midus_hf.files.secrets import for_record
from midus_hf.training.checkpoints import resumed_checkpoint

# Keys that may change when a run is resumed, because they do not change what is computed.
_FREE = re.compile(
    "(output_dir|resume_|run_name|project|attn_implementation|use_cpu|skip_memory_metrics|log_level"
    "|logging_|save_|load_best_model|eval_|per_device_|gradient_accumulation|metric_for_best|greater_is_better|push_to_hub|hub_"
    "|activation_checkpointing|gradient_checkpointing|dataloader_(num_workers|prefetch|persistent)|disable_tqdm).*"
)
_SEQUENCES = "sequences_per_step"

Result = TypeVar("Result")


@contextlib.contextmanager
def open_output(arguments: Any) -> Iterator[Path | None]:
    """Lock and create the output of a run in its main process, and yield the checkpoint to resume from, if there is one.

    At the end the output is unlocked, and removed if it contains nothing but the record of the run.

    Raises:
        RequestError: If the run may not write there; in all processes.
    """
    with contextlib.ExitStack() as opened:
        yield in_main_process(arguments, lambda: _open_here(arguments, opened))


def in_main_process(arguments: Any, work: Callable[[], Result]) -> Result:
    """Do work in the main process, and return its result, or raise its `RequestError`, in all processes."""
    outcome: list[Any] = [None, None]  # the result or error of the main process
    refused: RequestError | None = None
    if arguments.process_index == 0:
        try:
            outcome[0] = work()
        except RequestError as error:
            refused, outcome[1] = error, str(error)
    broadcast_object_list(outcome)
    result, refusal = outcome
    if refusal is not None:
        raise refused or RequestError(refusal)
    return result


def _open_here(arguments: Any, opened: contextlib.ExitStack) -> Path | None:
    output, resume = Path(arguments.output_dir), arguments.resume_from_checkpoint
    _check_folder(output, arguments.sources())
    busy = f"output_dir {str(output)!r} is being written by another run. Wait for it, or choose another folder."
    with contextlib.ExitStack() as opening:
        opening.enter_context(exclusive(output, RequestError(busy)))
        opening.callback(_take_back, output)
        checkpoint = resumed_checkpoint(output, resume)
        files = sorted(os.listdir(output))
        is_begun = RUN_CONFIG in files and CONFIG_FILE not in files  # by a run that has trained no model yet
        if checkpoint is not None:
            _check_same_run(arguments, checkpoint)
        elif files and not (resume == "auto" and is_begun):
            raise RequestError(
                f"output_dir is {str(output)!r}, which holds {first_few(files)}; choose another folder, remove it, or set "
                "resume_from_checkpoint: true."
            )
        with atomic_write(output / RUN_CONFIG) as partial:
            partial.write_text(write_yaml(_record(arguments)), encoding="utf-8")
        opened.push(opening.pop_all())
    return checkpoint


def _check_folder(output: Path, sources: Iterable[tuple[str, str]]) -> None:
    """Refuse an output that cannot be written, contains an input of the run, or is inside one."""
    if output.exists() and not output.is_dir():
        raise RequestError(f"output_dir is {str(output)!r}, a file; expected a folder.")
    ancestor = next(folder for folder in (output.absolute(), *output.absolute().parents) if folder.exists())
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK):
        raise RequestError(
            f"output_dir is {str(output)!r}, but {str(ancestor)!r} is not a folder to write in; choose another."
        )
    for key, source in sources:
        if Path(source).exists():  # other names are ids of models or datasets
            for outer, inner, verb in ((output, Path(source), "holds"), (Path(source), output, "lies in")):
                if inner.resolve().is_relative_to(outer.resolve()):
                    raise RequestError(
                        f"output_dir is {str(output)!r}, which {verb} the {key} {source!r}; choose another folder."
                    )


def _take_back(output: Path) -> None:
    if os.listdir(output) in ([], [RUN_CONFIG]):
        (output / RUN_CONFIG).unlink(missing_ok=True)
        output.rmdir()


def _record(arguments: Any) -> dict[str, Any]:
    return {**arguments.recorded(), _SEQUENCES: arguments.sequences_per_step}


def _check_same_run(arguments: Any, checkpoint: Path) -> None:
    """Refuse changed keys when a run is resumed from a checkpoint, since a run keeps its schedule and data."""
    path = checkpoint.parent / RUN_CONFIG
    if not path.is_file():
        return
    earlier, record = for_record(read_mapping(path)), _record(arguments)
    if earlier.get(_SEQUENCES) != record[_SEQUENCES]:
        raise RequestError(
            f"a step of the run to resume takes {earlier.get(_SEQUENCES)} sequences, and one of this run {record[_SEQUENCES]}; set "
            "gradient_accumulation_steps or per_device_train_batch_size so that all processes together take as many."
        )
    for name in sorted(earlier.keys() | record.keys()):
        if not _FREE.fullmatch(name) and earlier.get(name) != record.get(name):
            raise RequestError(
                f"{name} is {record.get(name, 'its default')!r}, but the run to resume has {earlier.get(name, 'its default')!r}; "
                "give the same, or start a new run in another folder."
            )
