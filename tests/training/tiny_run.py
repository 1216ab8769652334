"""What tiny runs need: corpora, tokenizers, upscaled checkpoints of every family, options, and what happens at a step."""

import math
import random
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest
from tiny import save_tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, TrainerCallback

from midus_hf.training.arguments import TrainArguments
from midus_hf.training.callbacks import GracefulStop, RunReport
from midus_hf.training.prepare import Prepared
from midus_hf.training.run import RunInterrupted, TrainResult, make_memory_trainer, run_training
from midus_hf.training.texts import read_texts
from midus_hf.training.trainer import MemoryTrainer
from upscalers.runs.upscale import upscale

# Where the Distributed policy puts two blocks among four layers.
NEW_LAYERS = [1, 4]

EOS_ID = 2


def is_new(name: str) -> bool:
    return any(name.startswith(f"model.layers.{layer}.") for layer in NEW_LAYERS)


def tiny_tokenizer(**special_tokens: str) -> PreTrainedTokenizerFast:
    """A tokenizer of the words `w3` to `w127`, each with the id in its name."""
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": EOS_ID} | {f"w{i}": i for i in range(3, 128)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{"pad_token": "<pad>", "eos_token": "<eos>", **special_tokens}
    )


def framing_tokenizer(frame: str) -> PreTrainedTokenizerFast:
    """`tiny_tokenizer` that puts special tokens around a text, as in `<bos> $A <eos>`."""
    tokenizer = tiny_tokenizer(bos_token="<bos>")
    special = [("<pad>", 0), ("<bos>", 1), ("<eos>", EOS_ID)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=frame, special_tokens=special)
    return tokenizer


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the letters that `document` uses: of a kind that the tokenizer class of every base reads."""
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": EOS_ID} | {letter: i for i, letter in enumerate("Ġw0123456789", 3)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def document(length: int, seed: int) -> str:
    """A text of `length` words, each depending on the one before, so that there is something to learn."""
    choice = random.Random(seed)
    word, words = 3, []
    for _ in range(length):
        word = 3 + (word * 7 + choice.randrange(4)) % 125
        words.append(f"w{word}")
    return " ".join(words)


def write_corpus(folder: Path, documents: int = 20, length: int = 60) -> Path:
    folder.mkdir(parents=True)
    for index in range(documents):
        (folder / f"{index:03}.txt").write_text(document(length, index), encoding="utf-8")
    return folder


# Methods whose texts fetch blocks.
FETCHING = ["hier-ffn", "hier-lora-qk", "hier-lora-vo", "hier-lora-ffn", "hier-kv"]

# How a tiny base is upscaled by a method.
METHODS: dict[str, dict[str, Any]] = {
    "midus-hml": {"num_new_layers": 2, "options": {"n": 8, "k": 2}},
    "midus-pkm": {"num_new_layers": 2, "options": {"n": 8, "k": 2}},
    "llama-pro": {"num_new_layers": 2},
    "ultramem-v2": {"options": {"n": 16, "k": 2, "share": "ring:2", "heads": 2}},
    "engram": {"options": {"rows": 64, "width": 8, "hash_heads": 2, "compress": False}},
    "moc": {"options": {"memory_tokens": 24, "chapters": 12, "k": 2, "chunk_size": 4, "layers": [1, 3]}},
    **{method: {"options": {"sizes": [4, 2], "branching": 3}} for method in FETCHING},
}


def save_upscaled(
    family: str,
    folder: Path,
    method: str = "midus-hml",
    options: dict[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **base_options: Any,
) -> Path:
    """Save a tiny base and what it is upscaled to, `folder / "model"`, and then give both a tokenizer, by default of words."""
    base = save_tiny_model(family, folder / "base", **base_options)
    request = METHODS[method]
    request = {**request, "options": {**request.get("options", {}), **(options or {})}}
    upscale(base=base, method=method, output=folder / "model", verify=False, **request)
    for checkpoint in (base, folder / "model"):
        (tokenizer or tiny_tokenizer()).save_pretrained(checkpoint)
    return folder / "model"


# Two sequences a step, at a rate that moves a tiny model: keys of a run, and of any Trainer.
_SMALL: dict[str, Any] = {"per_device_train_batch_size": 2, "learning_rate": 1e-2, "bf16": False, "logging_steps": 1}
TINY = {**_SMALL, "sequence_length": 16}
QUIET = {**_SMALL, "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}


def tiny_config(model: Path | None, corpus: Path, output: Path, **changes: Any) -> TrainArguments:
    options = {"model_name_or_path": None if model is None else str(model), "corpus": str(corpus), **TINY}
    return TrainArguments(**{"output_dir": str(output), **options, "max_steps": 20, **changes})


def write_recipe(folder: Path, model: Path, corpus: Path, **changes: Any) -> Path:
    options = {"model_name_or_path": model, "corpus": corpus, **TINY, "max_steps": 6, **changes}
    (folder / "recipe.yaml").write_text("".join(f"{name}: {value}\n" for name, value in options.items()))
    return folder / "recipe.yaml"


# The leaves of nine that the assigned corpus has texts of.
LEAVES = [0, 4, 5]


def block_config(model: Path, assigned: Path, output: Path, **changes: Any) -> TrainArguments:
    options = {"generic_share": 0.0, "max_steps": 6, "per_device_train_batch_size": 4, **changes}
    return tiny_config(model, assigned, output, path_column="memory_ids", **options)


def refused(message: str) -> AbstractContextManager:
    return pytest.raises(ValueError, match=message)


def give_held_out_losses(monkeypatch: pytest.MonkeyPatch, curve: Callable[[int], float]) -> None:
    """Let held-out text have the loss that a curve has at a step: which is best must not depend on how a processor rounds."""
    loop = MemoryTrainer.evaluation_loop

    def evaluation_loop(trainer: MemoryTrainer, *args: Any, **kwargs: Any) -> Any:
        output = loop(trainer, *args, **kwargs)
        name = next(name for name in output.metrics if name.endswith("_loss"))
        loss = output.metrics[name] = curve(trainer.state.global_step)
        output.metrics[f"{name.removesuffix('loss')}perplexity"] = math.exp(loss)
        return output

    monkeypatch.setattr(MemoryTrainer, "evaluation_loop", evaluation_loop)


def best_at(step: int) -> Callable[[int], float]:
    return lambda now: 3 + abs(now - step) / 100


# Moments of a step: before and after the parameters move, and when it counts as done.
BEFORE, AFTER, END = "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"


class AtStep(TrainerCallback):
    def __init__(self, step: int, work: Callable[[Any], Any], moment: str = BEFORE):
        self.step, self.work, self.is_done = step, work, moment == END
        setattr(self, moment, self._look)

    def _look(self, args, state, control, model=None, **kwargs):
        if self.step == state.global_step + (not self.is_done):
            self.work(model)


def signal_at(step: int, number: signal.Signals = signal.SIGINT) -> AtStep:
    return AtStep(step, lambda model: signal.raise_signal(number))


class _Prepared(Exception):
    pass


class PreparedRun:
    """A run up to its first step, with what it has made; a test may change it before `execute` does the rest."""

    trainer: Any
    model: Any
    tokenizer: Any
    texts: Any

    def __init__(self, arguments: Any, read: Callable = read_texts, make_trainer: Callable = make_memory_trainer):
        def keep(prepared: Prepared) -> Any:
            self.model, self.tokenizer, self.texts = prepared.model, prepared.tokenizer, prepared.texts
            self.trainer = make_trainer(prepared)
            self._train, self.trainer.train = self.trainer.train, self._wait
            return self.trainer

        self.arguments = arguments
        with suppress(_Prepared):
            run_training(arguments, read, keep)

    def _wait(self, *_: Any) -> None:
        raise _Prepared

    def execute(self) -> TrainResult:
        self.trainer.train = self._train
        for callback in (GracefulStop, RunReport):  # which the run adds again
            self.trainer.remove_callback(callback)

        def read(arguments: Any, config: Any, tokenizer: Any) -> Any:
            vars(tokenizer).update(vars(self.tokenizer))  # which reading may have changed
            return self.texts

        return run_training(self.arguments, read, lambda *_: self.trainer)


def interrupted(run: PreparedRun, step: int, number: signal.Signals = signal.SIGINT) -> RunInterrupted:
    """Train until a signal ends the run after a step, with a checkpoint; return what is raised."""
    run.trainer.add_callback(signal_at(step, number))
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(RunInterrupted) as raised:
        run.execute()
    assert handlers == [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    return raised.value
