"""One run from start to end: what it reads and loads is prepared, a Trainer made, trained and saved."""

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from huggingface_hub.errors import HfHubHTTPError
from transformers import TrainerState
from transformers.integrations import integration_utils

from midus_hf.anatomy.record import UpscaleRecord, record_of
from midus_hf.config.errors import RequestError, as_request_error, first_line, print_note
from midus_hf.data.packing import collate
from midus_hf.data.stream import StreamedSequences
from midus_hf.files.checkpoint_files import RUN_CONFIG
from midus_hf.sources.downloads import DownloadError, connection_errors
from midus_hf.sources.names import answer_of_hub
from midus_hf.sources.peak_memory import peak_memory_bytes
from midus_hf.sources.progress import limit_bars, without_library_bars
from midus_hf.training.arguments import MemoryArguments, TrainArguments
from midus_hf.training.callbacks import GracefulStop, RunReport
from midus_hf.training.checkpoints import check_inputs, resume_hint
from midus_hf.training.keys import planned_epochs, trains_new_parts
from midus_hf.training.optim import num_trained
from midus_hf.training.outcome import MeasureAtEnd, describe_outcome
from midus_hf.training.output import (
    PartialSaveError,
    in_main_process,
    open_output,
    rates_in,
    save_run,
    saved_step,
    saving_to,
    upload_model,
    write_run_config,
)
from midus_hf.training.prepare import Prepared, load_config, load_run_tokenizer, prepare
from midus_hf.training.rates import describe_rates, find_rates
from midus_hf.training.texts import RunTexts, read_texts, use_tree
from midus_hf.training.trainer import MemoryTrainer, check_checkpoint


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """Result of a run, with steps, tokens and events before a resumption."""

    output: str  #: folder of the trained model
    steps: int  #: number of optimizer steps
    tokens: int  #: number of tokens that all processes trained on
    loss: float | None  #: mean loss of the last log event; None if there was none
    #: the Trainer's `log_history`; the last has numbers of trained parameters and peak bytes
    log: list[dict[str, Any]]


def make_memory_trainer(prepared: Prepared) -> MemoryTrainer:
    """Return a Trainer on packed texts, checking that the model's banks belong to the run's tree or paths."""
    arguments, texts = prepared.arguments, prepared.texts
    if arguments.tree is not None or texts.tree is not None:
        use_tree(prepared.model, arguments.tree, texts.tree)
    fill = prepared.tokenizer.eos_token_id
    collator = partial(collate, sequence_length=arguments.sequence_length, fill=fill)
    return MemoryTrainer(
        prepared.model,
        arguments,
        collator,
        texts.train,
        texts.held_out,
        saved_dtypes=prepared.saved_dtypes,
        digests=prepared.digests,
    )


def run_training(
    arguments: Any,
    read: Callable[..., RunTexts] = read_texts,
    make_trainer: Callable[[Prepared], Any] = make_memory_trainer,
) -> TrainResult:
    """Pretrain a model on text, from its weights or from scratch.

    It prints what is trained, and writes to `arguments.output_dir` the trained model and its tokenizer, checkpoints, the Trainer's
    log (`trainer_state.json`) and the arguments (`train_config.yaml`).

    Args:
        arguments: `TrainArguments`, or other `MemoryArguments` that `read` and `make_trainer` take.
        read: Returns training and held-out data, from arguments, config and tokenizer. Default: packed texts.
        make_trainer: Makes the Trainer of what is prepared. Default: `MemoryTrainer`.

    Raises:
        RequestError: If the arguments are wrong; nothing but caches of `datasets` has been written then.
        TrainingError: If a step fails. The message says how to continue.
        FloatingPointError: If the loss, a gradient or a trained tensor stops being finite.
        RunInterrupted: If a signal ended training early, after a checkpoint was saved.
        PartialSaveError: If not all of the trained model could be saved or uploaded.
    """
    arguments = copy.copy(arguments)  # a run and its Trainer derive values, and leave what they were given
    config = load_config(arguments)
    tokenizer = load_run_tokenizer(arguments)
    with open_output(arguments) as checkpoint:
        with limit_bars():
            prepared = prepare(arguments, config, tokenizer, checkpoint, read)
            trainer = _make_checked_trainer(prepared, make_trainer)
        if arguments.learning_rate is None:
            _set_rates(trainer, arguments)
        _set_epochs(trainer, arguments)
        stop = GracefulStop(trainer.largest)
        _add_callbacks(trainer, prepared, stop)
        with saving_to(Path(arguments.output_dir)), stop, without_library_bars():
            _fit(trainer, prepared, stop)
            _save(trainer, prepared, stop)
    state = trainer.state
    if arguments.process_index == 0:
        _print_outcome(arguments, state)
    losses = [event["loss"] for event in state.log_history if "loss" in event]
    return TrainResult(
        output=str(arguments.output_dir),
        steps=state.global_step,
        tokens=int(state.num_input_tokens_seen),
        loss=losses[-1] if losses else None,
        log=state.log_history,
    )


def _make_checked_trainer(prepared: Prepared, make_trainer: Callable[[Prepared], Any]) -> Any:
    """Make the Trainer; refuse what only it knows, such as a checkpoint of other inputs."""
    arguments, checkpoint = prepared.arguments, prepared.checkpoint
    for name in arguments.report_to or ():
        if not getattr(integration_utils, f"is_{name}_available", lambda: True)():
            raise RequestError(f"report_to is {name}, not installed; install it, or set report_to to none.")
    hub_errors = (HfHubHTTPError, OSError, *connection_errors()) if arguments.push_to_hub else ()
    no_repository = "push_to_hub is true, and the Trainer makes a repository"
    with (
        as_request_error("the Trainer cannot be made", ImportError, ValueError),
        as_request_error(no_repository, *hub_errors, reason=_hub_failure_reason),
    ):
        trainer = make_trainer(prepared)
        trainer.get_optimizer_cls_and_kwargs(arguments)
    if checkpoint is not None:
        check_checkpoint(trainer, checkpoint)
        in_main_process(arguments, partial(check_inputs, trainer, checkpoint))
    return trainer


def _set_rates(trainer: Any, arguments: Any) -> None:
    """Set the rates that the arguments leave to the run: those of the run to resume, or measured ones."""
    record = Path(arguments.output_dir) / RUN_CONFIG
    rates = rates_in(record)
    if not rates:
        trains_new = trains_new_parts(vars(arguments), (record_of(trainer.model.config) or UpscaleRecord()).trainable)
        found = find_rates(trainer, trains_new)
        rates = broadcast_object_list([found.rates])[0]
        if arguments.process_index == 0:
            print(found)
    for key, rate in rates.items():
        setattr(arguments, key, rate)
        setattr(trainer.args, key, rate)
    if arguments.process_index == 0:
        write_run_config(arguments)


def _set_epochs(trainer: Any, arguments: Any) -> None:
    """Set how many epochs a run takes that was given neither epochs nor steps; `midus sft` trains by a copy of its arguments."""
    if arguments.num_train_epochs is None:
        epochs = planned_epochs(arguments, len(trainer.train_dataset))
        arguments.num_train_epochs = epochs
        trainer.args.num_train_epochs = epochs


def _add_callbacks(trainer: Any, prepared: Prepared, stop: GracefulStop) -> None:
    """Add what follows the steps of a run."""
    sequences = trainer.train_dataset
    num_sequences = None if isinstance(sequences, StreamedSequences) else len(sequences)
    trainer.add_callback(stop)
    if trainer.args.eval_on_start:
        trainer.add_callback(MeasureAtEnd())
    trainer.add_callback(
        RunReport(prepared.texts.reads or f"dataset_name: {num_sequences:,} sequences", num_sequences)
    )


def _fit(trainer: Any, prepared: Prepared, stop: GracefulStop) -> None:
    """Train until the last step, or until a signal; raise what failed with a way to continue."""
    output = Path(prepared.arguments.output_dir)
    try:
        trainer.train(prepared.checkpoint)
    # A `RequestError` of a step is not about the arguments, which have been checked.
    except (ValueError, DownloadError) as error:
        if trainer.state.max_steps == 0:  # the checkpoint is not one of this run
            raise
        step = trainer.state.global_step + 1
        reason = error.facts if isinstance(error, DownloadError) else str(error).rstrip(".")
        raise TrainingError(f"step {step:,} failed: {reason}. To continue, {resume_hint(output)}.") from error
    if stop.signal_number:
        step = trainer.state.global_step
        saved = output / f"checkpoint-{step}"
        way = f"--resume_from_checkpoint true continues from {saved}"
        if trainer.args.save_only_model:
            way = f"{saved} has only the trained parameters, by save_only_model, and no run can continue from it"
        raise RunInterrupted(f"interrupted after step {step:,}; {way}", stop.signal_number)
    blocks = sum(bank.layout.bank for bank in ([] if trainer.blocks is None else trainer.blocks.banks))
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_memory_bytes()
    trainer.log({"trained_parameters": num_trained(trainer.model) + blocks, "peak_memory_bytes": peak})


def _save(trainer: Any, prepared: Prepared, stop: GracefulStop) -> None:
    """Save the trained model, certify protected texts, and upload."""
    arguments = prepared.arguments
    output = Path(arguments.output_dir)
    is_main = arguments.process_index == 0
    failures = save_run(trainer, prepared)
    if prepared.protection is not None and is_main:
        stop.release()  # the model is saved, so a signal may end this at once
        # Without the autocast of accelerate, so that texts are computed in the dtype of the saved model.
        model = trainer.accelerator.unwrap_model(prepared.model, keep_fp32_wrapper=False)
        prepared.protection.certify(model, output)
    if failures:
        raise PartialSaveError(
            f"the trained model is in {output}, but without {' and '.join(failures)}; copy what is missing from "
            f"{arguments.model_name_or_path or arguments.tokenizer_name}."
        )
    if arguments.push_to_hub and is_main:
        upload_model(trainer.hub_model_id, output, arguments.hub_token)


def _print_outcome(arguments: MemoryArguments, state: TrainerState) -> None:
    lines, warnings = describe_outcome(state.log_history, saved_step(arguments, state), describe_rates(arguments))
    for line in lines:
        print(line)
    for warning in warnings:
        print_note(f"warning: {warning}")


def measure_texts(arguments: TrainArguments) -> dict[str, float]:
    """Evaluate held-out texts as during training; return the loss of each in nats per token, by name.

    The name of a single text is `""`. Files that the Trainer writes to `arguments.output_dir` are removed.
    """
    config = load_config(arguments)
    tokenizer = load_run_tokenizer(arguments)
    with open_output(arguments), limit_bars(), without_library_bars():
        prepared = prepare(arguments, config, tokenizer, None, read_texts, trains=False)
        metrics = make_memory_trainer(prepared).evaluate()
    return {name: metrics[f"eval_{name}_loss" if name else "eval_loss"] for name in arguments.eval_texts}


class TrainingError(RuntimeError):
    """Error of a step; the message says how to continue."""


class RunInterrupted(KeyboardInterrupt):
    """Error of a run that was interrupted after saving a checkpoint; the message says how to resume."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.signal_number = signal_number


def _hub_failure_reason(error: Exception) -> str:
    reason = answer_of_hub(error) or f"the Hub cannot be reached ({first_line(error)})"
    return f"{reason}. Or leave push_to_hub out, and upload the folder later."
