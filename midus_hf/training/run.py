"""One run from start to end: reading, loading, training and saving; its progress, and interruptions."""

import contextlib
import copy
import dataclasses
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from huggingface_hub.errors import HfHubHTTPError
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    set_seed,
)
from transformers.integrations import integration_utils
from transformers.trainer_utils import has_length

from midus_hf.anatomy.record import UpscaleRecord, record_of
from midus_hf.config.errors import RequestError, as_request_error, first_line, is_main_process, print_note
from midus_hf.data.packing import collate
from midus_hf.data.stream import StreamedSequences
from midus_hf.files.checkpoint_files import RUN_CONFIG
from midus_hf.models.view import ModelView
from midus_hf.sources.downloads import DownloadError, connection_errors
from midus_hf.sources.names import answer_of_hub
from midus_hf.sources.peak_memory import peak_memory_bytes
from midus_hf.sources.progress import limit_bars, show_progress, without_library_bars
from midus_hf.training.arguments import MemoryArguments, TrainArguments
from midus_hf.training.checkpoints import resume_hint
from midus_hf.training.inputs import (
    RunTexts,
    check_inputs,
    load_config,
    load_for_training,
    load_run_tokenizer,
    model_hashes,
    planned_epochs,
    read_texts,
    use_tree,
)
from midus_hf.training.keys import ENOUGH_STEPS, trains_new_parts
from midus_hf.training.optim import cast_for_training, num_trained, set_trainable
from midus_hf.training.outcome import MeasureAtEnd, describe_outcome, measured_texts
from midus_hf.training.output import (
    PartialSaveError,
    in_main_process,
    open_output,
    rates_in,
    save_model,
    saved_step,
    saving_to,
    upload_model,
    write_run_config,
)
from midus_hf.training.protection import Protection
from midus_hf.training.rates import describe_rates, find_rates
from midus_hf.training.template_day import DAY_KEY, first_day
from midus_hf.training.trainer import MemoryTrainer, check_checkpoint

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Seconds in which signals count as one, since launchers repeat a signal that the terminal already sent.
_SECONDS_OF_ONE_REQUEST = 1.0
# With fewer steps there is a warning, which recommends `ENOUGH_STEPS`.
_FEW_STEPS = 30
# Steps of as many seconds are compared with their processor time; a quiet machine gives a run of several threads more than one core.
_SECONDS_COMPARED, _SECONDS_PER_PROCESSOR_SECOND = 10.0, 1.5
_CHOSEN_DTYPE = {
    True: "this device computes bfloat16: the run computes in it, with trained parameters in float32; set bf16 to choose",
    False: "this device does not compute bfloat16: the run computes in float32; set bf16 to choose",
}


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """Result of a run, with steps, tokens and events before a resumption."""

    output: str  #: folder of the trained model
    steps: int  #: number of optimizer steps
    tokens: int  #: number of tokens that all processes trained on
    loss: float | None  #: mean loss of the last log event; None if there was none
    log: list[
        dict[str, Any]
    ]  #: the Trainer's `log_history`; the last has numbers of trained parameters and peak bytes


def make_memory_trainer(
    model: PreTrainedModel, arguments: TrainArguments, tokenizer: PreTrainedTokenizerBase, texts: RunTexts
) -> MemoryTrainer:
    """Return a Trainer on packed texts, checking that the model's banks belong to the run's tree or paths."""
    if arguments.tree is not None or texts.tree is not None:
        use_tree(model, arguments.tree, texts.tree)
    collator = partial(collate, sequence_length=arguments.sequence_length, fill=tokenizer.eos_token_id)
    return MemoryTrainer(model, arguments, collator, texts.train, texts.held_out)


def run_training(
    arguments: Any, read: Callable[..., RunTexts] = read_texts, make_trainer: Callable[..., Any] = make_memory_trainer
) -> TrainResult:
    """Pretrain a model on text, from its weights or from scratch.

    It prints what is trained, and writes to `arguments.output_dir` the trained model and its tokenizer, checkpoints, the Trainer's
    log (`trainer_state.json`) and the arguments (`train_config.yaml`).

    Args:
        arguments: `TrainArguments`, or other `MemoryArguments` that `read` and `make_trainer` take.
        read: Returns training and held-out data, from arguments, config and tokenizer. Default: packed texts.
        make_trainer: Makes the Trainer, from model, arguments, tokenizer and texts. Default: `MemoryTrainer`.

    Raises:
        RequestError: If the arguments are wrong; nothing but caches of `datasets` has been written then.
        TrainingError: If a step fails. The message says how to continue.
        FloatingPointError: If the loss, a gradient or a trained tensor stops being finite.
        RunInterrupted: If a signal ended training early, after a checkpoint was saved.
        PartialSaveError: If not all of the trained model could be saved or uploaded.
    """
    arguments = copy.copy(arguments)  # a run and its Trainer derive values, and leave what they were given
    output, is_main = Path(arguments.output_dir), arguments.process_index == 0
    config = load_config(arguments)
    tokenizer = load_run_tokenizer(arguments)
    with open_output(arguments) as checkpoint:
        if arguments.num_train_epochs is None and arguments.max_steps > 0:
            arguments.num_train_epochs = 1.0  # which the Trainer compares with 0, and else leaves to max_steps
        arguments.first_day = in_main_process(arguments, partial(first_day, checkpoint))
        with limit_bars():
            with arguments.main_process_first(desc="reading texts"):
                texts = read(arguments, config, tokenizer)
            if arguments.eval_share and texts.held_out is None:
                arguments.eval_on_start = False
            set_seed(arguments.seed)
            model, files = load_for_training(arguments, config)
            hashes = model_hashes(model, arguments) if is_main else {}
            uses_cache = model.config.use_cache
            if arguments.eval_share and texts.held_out is not None:
                texts = texts._replace(held_out=measured_texts(texts.held_out, model, tokenizer, arguments))
            model, report = _freeze(ModelView(model), arguments)
            dtypes = cast_for_training(model, arguments.bf16)
            if is_main:
                print(report)
                if arguments.chooses_bf16:
                    print(_CHOSEN_DTYPE[arguments.bf16])
                if checkpoint is not None:
                    print(f"resuming from {checkpoint}")
            protection = None
            if arguments.protect:
                with arguments.main_process_first(desc="reading protected texts"):
                    column = getattr(arguments, "text_column", "text")
                    protection = Protection(model, tokenizer, arguments.protect, column)
                if checkpoint is not None:
                    protection.check_checkpoint(model, checkpoint)
                if is_main:
                    print(protection)
            for name in arguments.report_to or ():
                if not getattr(integration_utils, f"is_{name}_available", lambda: True)():
                    raise RequestError(f"report_to is {name}, not installed; install it, or set report_to to none.")
            hub_errors = (HfHubHTTPError, OSError, *connection_errors()) if arguments.push_to_hub else ()
            no_repository = "push_to_hub is true, and the Trainer makes a repository"
            with (
                as_request_error("the Trainer cannot be made", ImportError, ValueError),
                as_request_error(no_repository, *hub_errors, reason=_hub_failure_reason),
            ):
                trainer = make_trainer(model, arguments, tokenizer, texts)
                trainer.get_optimizer_cls_and_kwargs(arguments)
            if checkpoint is not None:
                check_checkpoint(trainer, checkpoint)
            inputs = in_main_process(arguments, partial(check_inputs, trainer, hashes, arguments, checkpoint))
            trainer.inputs = {**inputs, DAY_KEY: {"day": arguments.first_day}}
        if arguments.learning_rate is None:
            _set_rates(trainer, arguments)
        sequences = trainer.train_dataset
        num_sequences = None if isinstance(sequences, StreamedSequences) else len(sequences)
        if arguments.num_train_epochs is None:
            arguments.num_train_epochs = trainer.args.num_train_epochs = planned_epochs(arguments, len(sequences))
        stop = GracefulStop(trainer.largest)
        trainer.add_callback(stop)
        if trainer.args.eval_on_start:
            trainer.add_callback(MeasureAtEnd())
        trainer.add_callback(RunReport(texts.reads or f"dataset_name: {num_sequences:,} sequences", num_sequences))
        with saving_to(output), stop, without_library_bars():
            try:
                trainer.train(checkpoint)
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
                    way = (
                        f"{saved} has only the trained parameters, by save_only_model, and no run can continue from it"
                    )
                raise RunInterrupted(f"interrupted after step {step:,}; {way}", stop.signal_number)
            blocks = sum(bank.layout.bank for bank in ([] if trainer.blocks is None else trainer.blocks.banks))
            peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_memory_bytes()
            trainer.log({"trained_parameters": num_trained(trainer.model) + blocks, "peak_memory_bytes": peak})
            failures = save_model(trainer, arguments, dtypes, uses_cache, tokenizer, files)
            if protection is not None and is_main:
                stop.release()  # the model is saved, so a signal may end this at once
                # Without the autocast of accelerate, so that texts are computed in the dtype of the saved model.
                protection.certify(trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False), output)
            if failures:
                raise PartialSaveError(
                    f"the trained model is in {output}, but without {' and '.join(failures)}; copy what is missing from "
                    f"{arguments.model_name_or_path or arguments.tokenizer_name}."
                )
            if arguments.push_to_hub and is_main:
                upload_model(trainer.hub_model_id, output, arguments.hub_token)
    state = trainer.state
    if is_main:
        _print_outcome(arguments, state)
    losses = [event["loss"] for event in state.log_history if "loss" in event]
    tokens, loss = int(state.num_input_tokens_seen), losses[-1] if losses else None
    return TrainResult(str(output), state.global_step, tokens, loss, state.log_history)


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
        texts = read_texts(arguments, config, tokenizer)
        set_seed(arguments.seed)
        model, _ = load_for_training(arguments, config)
        model, _ = _freeze(ModelView(model), arguments)
        cast_for_training(model, bool(arguments.bf16))
        metrics = make_memory_trainer(model, arguments, tokenizer, texts).evaluate()
    return {name: metrics[f"eval_{name}_loss" if name else "eval_loss"] for name in arguments.eval_texts}


class TrainingError(RuntimeError):
    """Error of a step; the message says how to continue."""


def _freeze(view: ModelView, arguments: MemoryArguments) -> tuple[Any, str]:
    if arguments.adapters is None:
        return view.model, str(set_trainable(view, arguments.trainable, arguments.frozen))  # type: ignore[arg-type]
    from midus_hf.training.adapters import add_adapters

    assert isinstance(arguments.adapters, dict), "checked by the arguments"
    return add_adapters(view, arguments.adapters)


def _hub_failure_reason(error: Exception) -> str:
    reason = answer_of_hub(error) or f"the Hub cannot be reached ({first_line(error)})"
    return f"{reason}. Or leave push_to_hub out, and upload the folder later."


class RunInterrupted(KeyboardInterrupt):
    """Error of a run that was interrupted after saving a checkpoint; the message says how to resume."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.signal_number = signal_number


class RunReport(TrainerCallback):
    """Prints what a run reads, its steps, whether they are few, and, without bars, a line each minute.

    The number of sequences is None for a stream; its place in the run is that of its steps, also after a resumption. A note says
    once that other programs use the cores, so that threads wait for each other; a process with one thread, or that waits for a GPU
    or other processes, is excluded.
    """

    _is_noted = False
    _began = (0.0, 0.0)  # a step: the time, and the processor time of all threads
    _seconds = _processor_seconds = 0.0

    def __init__(self, reads: str, num_sequences: int | None):
        self.reads, self.num_sequences = reads, num_sequences
        self._training: Any = None
        self._evaluation: Any = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        steps = state.max_steps
        if args.process_index == 0:
            if self.num_sequences is None:
                how_often = f"{steps * args.sequences_per_step:,} sequences"
            else:
                # The last step of an epoch may read fewer sequences than the others.
                batch, count = args.train_batch_size * args.world_size, self.num_sequences
                batches = max(1, count // batch if args.dataloader_drop_last else math.ceil(count / batch))
                of_epoch = min(batches * batch, count)
                epochs, others = divmod(steps, math.ceil(batches / args.gradient_accumulation_steps))
                times = (epochs * of_epoch + min(others * args.sequences_per_step, of_epoch)) / count
                often = "once" if times == 1 else f"{times:.3g} times"
                how_often = f"{often} each" if times >= 1 else f"{times:.0%} of the sequences"
            print(f"{self.reads}; {steps:,} step{'s' * (steps != 1)} ({how_often})", flush=True)
            if steps < _FEW_STEPS:
                remedy = "raise max_steps"
                if args.max_steps <= 0:
                    epochs = math.ceil(ENOUGH_STEPS * args.num_train_epochs / steps)
                    remedy = f"num_train_epochs={epochs} takes at least {ENOUGH_STEPS}"
                print_note(f"{steps} step{'s are' if steps != 1 else ' is'} few, so a model learns little: {remedy}")
        if args.disable_tqdm and not sys.stderr.isatty():  # else the Trainer has bars
            begun: dict[str, Any] = {"total": steps, "initial": state.global_step}
            self._training = show_progress(desc="training", unit=" steps", leave=False, **begun)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._began = time.monotonic(), time.process_time()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.num_sequences is None:  # the Trainer counts from where it began to read
            state.epoch = state.global_step / state.max_steps
        if self._training is not None:
            self._training.update()
        threads = torch.get_num_threads()
        if self._is_noted or threads == 1 or args.world_size > 1 or args.device.type != "cpu":
            return
        self._seconds += time.monotonic() - self._began[0]
        self._processor_seconds += time.process_time() - self._began[1]
        if self._seconds < _SECONDS_COMPARED:
            return
        if self._seconds > _SECONDS_PER_PROCESSOR_SECOND * self._processor_seconds:
            self._is_noted = True
            print_note(
                f"steps took {self._seconds:.0f} s, and {threads} threads got {self._processor_seconds:.0f} s of processor time: "
                "other programs use the cores, and threads wait for each other. With OMP_NUM_THREADS=1 none waits"
            )
        self._seconds = self._processor_seconds = 0.0

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, eval_dataloader: Any = None, **_: Any
    ) -> None:
        if self._training is None:
            return
        if self._evaluation is None:
            total = len(eval_dataloader) if has_length(eval_dataloader) else None
            self._evaluation = show_progress(desc="evaluating", unit=" batches", leave=False, total=total)
        self._evaluation.update()

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._evaluation = None


class GracefulStop(TrainerCallback):
    """Callback that ends training, with a checkpoint, after the step in which SIGINT or SIGTERM arrives.

    All processes end in the same step: `largest` returns the maximum over processes. A signal during the last step has no effect; a
    second one acts at once. It also logs where a run saves or measures, and in the last step: a logged loss is the mean since the
    previous event, so a resumed run logs the losses of an uninterrupted one.
    """

    def __init__(self, largest: Callable[[int], int]):
        self.largest = largest
        self.signal_number = 0  # for which all processes have stopped; 0 if there was none
        self._noted, self._noted_at = 0, 0.0
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            # A signal that the process ignores, as under nohup, stays ignored.
            handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._handlers = {number: signal.signal(number, self._note) for number in handled}

    def release(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    __exit__ = release

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        noted = self.largest(self._noted)
        if noted and state.global_step < state.max_steps and not control.should_training_stop:
            self.signal_number = noted
            control.should_training_stop = control.should_save = True
        if control.should_save or control.should_evaluate or 0 < state.max_steps <= state.global_step:
            control.should_log = True

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.signal_number:  # training that stops ends the epoch, which would measure all held-out texts first
            control.should_evaluate = control.should_save = False
        if control.should_save or control.should_evaluate:
            control.should_log = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._noted:
            self._noted, self._noted_at = number, time.monotonic()
            if is_main_process():
                # print is unsafe here: the signal may have interrupted another print.
                with contextlib.suppress(OSError):  # the reader may be gone
                    os.write(2, b"\nStopping after this step, with a checkpoint; interrupt again to stop at once.\n")
        elif time.monotonic() - self._noted_at > _SECONDS_OF_ONE_REQUEST:
            self.release()
            signal.raise_signal(number)
