"""The command line of slot usage: `memory_usage.py MODEL --text FILE`."""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Words after the program's name. Default: those of the process.

    Returns:
        Exit status: 0 done, 2 the request is wrong (one line on standard error says how). A failure of the work
        raises.
    """
    options = _parser().parse_args(arguments)
    try:
        _measure(options)
    except ValueError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _measure(options: argparse.Namespace) -> None:
    from rich.console import Console
    from tqdm import tqdm

    from midus_hf.analysis.report import draw_usage, usage_table
    from midus_hf.analysis.usage import record_usage
    from midus_hf.documents import describe_files, read_documents
    from midus_hf.evaluation.perplexity import perplexity

    if options.output is not None:
        _check_output(options.output)
    if (line := describe_files(options.text)) is not None:
        print(line, file=sys.stderr)
    documents = read_documents(options.text, options.column, options.encoding)
    # Libraries that print must not come between the caller and the result.
    with contextlib.redirect_stdout(sys.stderr):
        model, tokenizer = _load(options.model, options.dtype, options.device)
        with record_usage(model) as usage, tqdm(desc="reading", unit=" tokens", disable=None) as bar:

            def show_progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            result = perplexity(
                model,
                tokenizer,
                documents,
                sequence_length=options.sequence_length,
                max_tokens=options.max_tokens,
                batch_size=options.batch_size,
                progress=show_progress,
            )
    layers = usage.summary()
    if options.json:
        report = {
            "model": options.model,
            "tokens": result.tokens,
            "perplexity": result.perplexity,
            "layers": {layer: dataclasses.asdict(of_layer) for layer, of_layer in layers.items()},
        }
        print(json.dumps(report, indent=2, allow_nan=False))
    else:
        console = Console()
        console.print(usage_table(layers))
        console.print(f"{result.tokens:,} tokens of {options.text}, perplexity {result.perplexity:.4f}")
    if options.output is not None:  # last, so that a picture that cannot be written costs nothing else
        draw_usage(usage.counts, options.output)


def _check_output(path: Path) -> None:
    from midus_hf.analysis.report import PICTURE_SUFFIXES

    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "output is a picture, which needs matplotlib; install it with pip install 'midus-hf[report]'."
        )
    if path.suffix not in PICTURE_SUFFIXES:
        raise ValueError(f"output is {str(path)!r}; expected a file ending in {', '.join(PICTURE_SUFFIXES)}.")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"output is {str(path)!r}, in a folder that does not exist; create it first.")


def _load(name: str, dtype: str, device: str | None) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from midus_hf.documents import first_line

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False)
        model.to(torch.device(device))  # type: ignore[arg-type]  # transformers' wrapper hides the argument
    except (OSError, RuntimeError) as error:
        raise ValueError(f"model is {name!r}, which cannot be loaded on {device}: {first_line(error)}") from error
    return model.eval(), tokenizer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="memory_usage.py",
        description="Let a model read a text and say which of its memory slots are retrieved, and how evenly.",
    )
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of a model with memory layers")
    parser.add_argument("--text", required=True, metavar="PATH", help="the file or folder to read")
    parser.add_argument(
        "--column", default="text", metavar="NAME", help="where rows of JSON and Parquet hold the text"
    )
    parser.add_argument("--encoding", default="utf-8", metavar="NAME", help="of plain text and JSON lines")
    parser.add_argument("--sequence-length", type=int, metavar="N", help="tokens of a window (default: 1024)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="read at most so many (default: all)")
    parser.add_argument("--batch-size", type=int, default=4, metavar="N", help="windows a forward pass (default: 4)")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="(default: auto)"
    )
    parser.add_argument("--device", metavar="NAME", help="such as cpu or cuda:0 (default: the first GPU, else cpu)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="draw the usage, most retrieved slots first (.png, .svg or .pdf)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    return parser
