"""Steps that studies share: commands that a person could type, their options, and where results are stored."""

import argparse
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.study import Row, command_line

_BIN = Path(sys.executable).parent
_RESULTS = Path(__file__).parent / "results"

# Options of `midus train` for small models that are trained from scratch.
FROM_NOTHING = {
    "trainable": "all",
    "gradient_accumulation_steps": 1,
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "warmup_ratio": 0.05,
    "min_learning_rate_ratio": 0.1,
    "bf16": False,
    "logging_steps": 20,
}

# Options of `midus train` for runs that train only the blocks of a bank.
OF_BLOCKS = {
    "value_schedule": "fixed",
    "value_weight_decay": 1e-3,
    "adam_beta2": 0.95,
    "sequence_length": 128,
    "document_mask": True,
    "bf16": False,
}


def study(
    description: str | None, work: str | None = "models, which a later run goes on with"
) -> argparse.ArgumentParser:
    """Return the command line of a study, with an option `--work` for a folder, unless `work` is None."""
    parser = command_line(description)
    if work is not None:
        parser.add_argument("--work", type=Path, required=True, help=f"folder for {work}")
    return parser


def results_of(name: str, arguments: argparse.Namespace) -> Path | None:
    """Return the path of a study's CSV, or None if `--no-append` is given."""
    return None if arguments.no_append else _RESULTS / f"{name}.csv"


def run_command(command: Any, *arguments: Any) -> str:
    """Run a command of this environment, print it on standard error, and return what it printed on standard output."""
    program, *names = command.split()
    line = [str(_BIN / program), *names, *map(str, arguments)]
    print(f"$ {shlex.join(line)}", file=sys.stderr, flush=True)
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{line[0]} ended with status {done.returncode}")
    return done.stdout


def run_once(output: Path, *arguments: Any) -> None:
    """Run the command that writes the model `output`, unless the model exists. Interrupted training is resumed.

    A training run that was interrupted before its first checkpoint begins anew.
    """
    if (output / "config.json").is_file():
        return
    began = (output / "train_config.yaml").is_file()
    going_on = "resume_from_checkpoint=auto" if any(output.glob("checkpoint-*")) else "overwrite_output_dir=true"
    run_command(*arguments, *([going_on] if began else []))


def train_once(
    output: Path, options: Mapping[str, Any], command: str = "midus train", recipe: Path | None = None
) -> None:
    """Train the model `output`, unless it exists."""
    keys = {**options, "output_dir": output}
    if recipe is None:
        recipe = output.with_name(f"{output.name}.recipe.json")
        recipe.write_text(json.dumps(keys, default=str), encoding="utf-8")  # JSON is YAML as well
        run_once(output, command, recipe)
    else:
        run_once(output, command, recipe, *(f"{key}={value}" for key, value in keys.items()))


def upscale_once(output: Path, base: Path, method: str, seed: int, *flags: Any, **options: Any) -> dict[str, int]:
    """Upscale a base, unless the output exists, and return the parameter counts that `upscale` recorded."""
    flags = (*flags, *(word for name, value in options.items() for word in ("--set", f"{name}={value}")))
    run_once(output, "upscale", "--base", base, "--method", method, *flags, "--seed", seed, "--output", output)
    return json.loads((output / "upscale.json").read_text(encoding="utf-8"))["parameters"]


def evaluated(model: Path, *flags: Any) -> dict[str, Any]:
    """Return the result of `midus eval --json` for a model."""
    return json.loads(run_command("midus eval", model, "--json", *flags))["models"][0]


def loss_of(model: Path, text: Path, *flags: Any) -> float:
    """Return the loss of a model on a text, in nats per token."""
    return math.log(evaluated(model, "--text", text, *flags)["perplexity"]["perplexity"])


def events_of(run: Path) -> list[dict[str, Any]]:
    """Return the events that a training run logged."""
    return read_rows(run / "log.jsonl")


def remembered(file: Path, measure: Callable[[], Row]) -> tuple[Row, bool]:
    """Return the row in a file, and whether it was measured now. Without the file, the row is measured and stored."""
    is_new = not file.is_file()
    if is_new:
        file.write_text(json.dumps(measure()), encoding="utf-8")
    return json.loads(file.read_text(encoding="utf-8")), is_new


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write a file of JSON lines, and return its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def small_tokenizer(folder: Path, texts: Iterable[str], vocabulary: int) -> Path:
    """Return the folder of a byte-level BPE tokenizer, trained on the texts unless it exists. Token 0 ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        tokenizer.train_from_iterator(texts, trainer)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder
