"""Attention over the depth against none, from the beginning: tables 3 and 6 of Mixture-of-Depths Attention, made small.

    python -m experiments.depth_from_scratch --work outputs/depth-from-scratch
    python -m experiments.depth_from_scratch --work outputs/depth-from-scratch --layers 24 --seeds 0,1,2 --steps 2000

Three models, with norms in front (Llama) and again with norms behind (OLMo 2): without slots, with those that attention writes, and
with those that are projected for the feed-forward network as well. OLMo 2 norms what attention and the feed-forward network return,
inside the residual branch, and its queries and keys: the nearest that a family here has to the paper's post-norm, which is
`x = LN(x + f(x))`.

All models of a seed read the same Wikipedia articles in the same order, so that each is compared with the one without slots seed by
seed. The loss is that of every tenth article, which no model trains on. Every step is a command that a person would type; what is in
the folder is not done again, and its rows are told again without being appended.
"""

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.commands import run_command, run_once
from benchmarks.tracked import Run, append, this_run
from experiments.small_tokenizer import small_tokenizer
from material.articles import articles
from midus_hf.config.flops.model import estimate_flops
from midus_hf.config.memories.depth_attention import DepthAttentionOptions
from midus_hf.config.memory_entries import MemoryEntry
from midus_hf.config.parameters import count_parameters

DEPTH_FROM_SCRATCH_RESULTS = Path(__file__).parent / "results" / "depth_from_scratch.csv"
_VOCABULARY, _TOKENS, _SEQUENCES = 2048, 128, 8
_HIDDEN, _INNER, _HEADS, _KEY_VALUE_HEADS = 96, 256, 6, 2

NORMS = {"pre": ("Llama", "llama"), "post": ("Olmo2", "olmo2")}
"""The class and the model type of the family that has its norms there."""

SLOTS = ("none", "attention", "attention+ffn")
"""What later layers read."""

ARMS = {f"{norms}-{slots}": (norms, slots) for norms in NORMS for slots in SLOTS}


@dataclass(frozen=True)
class Row(Run):
    """One model after one run; the loss of held-out text in nats per token, the time that training took in seconds."""

    norms: str
    slots: str
    layers: int
    seed: int
    parameters: int
    flops_per_token: float
    trained_tokens: int
    seconds: float
    loss: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models, which a later run goes on with")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"joined by commas (default: {','.join(ARMS)})")
    parser.add_argument("--seeds", default="0,1", help="joined by commas (default: 0,1)")
    parser.add_argument("--layers", type=int, default=12, help="of each model (default: 12)")
    parser.add_argument("--steps", type=int, default=320, help="of 1,024 tokens (default: 320)")
    parser.add_argument("--rate", default="3e-3", help="maximum learning rate of all (default: 3e-3)")
    parser.add_argument("--max-tokens", type=int, default=32768, help="of held-out text (default: 32768)")
    parser.add_argument("--no-append", action="store_true", help="print alone")
    arguments = parser.parse_args()
    rows = []
    for row, is_new in _rows(this_run("cpu"), arguments):
        rows.append(row)
        if is_new and not arguments.no_append:
            append([row], DEPTH_FROM_SCRATCH_RESULTS)
    print("\n".join(table(rows)))


def table(rows: Sequence[Row]) -> list[str]:
    """Means over seeds in markdown, with the least and the greatest; differences are from the same seed's model without slots."""
    lines = [
        "| norms | slots | parameters | MFLOPs a token | seconds | held-out loss | difference |",
        "|---|---|---|---|---|---|---|",
    ]
    vanilla = {(row.norms, row.seed): row.loss for row in rows if row.slots == "none"}
    for norms, slots in dict.fromkeys((row.norms, row.slots) for row in rows):
        of_arm = [row for row in rows if (row.norms, row.slots) == (norms, slots)]
        differences = [
            row.loss - vanilla[norms, row.seed] for row in of_arm if slots != "none" and (norms, row.seed) in vanilla
        ]
        cells = [
            norms,
            slots,
            f"{of_arm[0].parameters:,}",
            f"{of_arm[0].flops_per_token / 1e6:.2f}",
            f"{statistics.mean(row.seconds for row in of_arm):.0f}",
            _with_range([row.loss for row in of_arm], "{:.4f}"),
            _with_range(differences, "{:+.4f}") if differences else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _with_range(numbers: list[float], form: str) -> str:
    told = form.format(statistics.mean(numbers))
    return f"{told} ({form.format(min(numbers))} to {form.format(max(numbers))})" if len(numbers) > 1 else told


def _rows(run: Run, arguments: argparse.Namespace) -> Iterator[tuple[Row, bool]]:
    """Every model's row, and whether it was not there before."""
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    train, held_out = split_articles(work)
    tokenizer = small_tokenizer(work / "tokenizer", read_texts(train), _VOCABULARY)
    for seed in map(int, arguments.seeds.split(",")):
        for arm in arguments.arms.split(","):
            config = config_of(*ARMS[arm], arguments.layers)
            model = work / f"{arm}-{arguments.layers}-{arguments.steps}-{arguments.rate}-{seed}"
            measured = work / f"{model.name}.row.json"
            if measured.is_file():
                yield Row(**json.loads(measured.read_text(encoding="utf-8"))), False
                continue
            config_file = work / f"{model.name}.config.json"
            config_file.write_text(json.dumps(config, indent=2), encoding="utf-8")
            recipe = work / f"{model.name}.yaml"
            recipe.write_text(_recipe(config_file, tokenizer, train, model, seed, arguments), encoding="utf-8")
            run_once(model, "midus-train", recipe)
            words = [
                model,
                "--json",
                "--sequence-length",
                _TOKENS,
                "--max-tokens",
                arguments.max_tokens,
                "--text",
                held_out,
            ]
            told = json.loads(run_command("midus-eval", *words))["models"][0]["perplexity"]["perplexity"]
            norms, slots = ARMS[arm]
            row = Row(
                **asdict(run),
                norms=norms,
                slots=slots,
                layers=arguments.layers,
                seed=seed,
                parameters=count_parameters(config).total,
                flops_per_token=estimate_flops(config, _TOKENS).forward / _TOKENS,
                trained_tokens=arguments.steps * _TOKENS * _SEQUENCES,
                seconds=_seconds(model / "log.jsonl"),
                loss=math.log(told),
            )
            measured.write_text(json.dumps(asdict(row)), encoding="utf-8")
            yield row, True


def config_of(norms: str, slots: str, layers: int) -> dict[str, Any]:
    """The config of one model."""
    name, model_type = NORMS[norms]
    config = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": model_type,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KEY_VALUE_HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": _TOKENS,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "vocab_size": _VOCABULARY,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    if slots == "none":
        return config
    options = DepthAttentionOptions(joining="joint", attention_slots="reused", ffn_slots=slots == "attention+ffn")
    entry = MemoryEntry(options, "inside-attention", tuple(range(layers)), "depth-attention")
    return {
        **config,
        "architectures": [f"Midus{name}ForCausalLM"],
        "model_type": f"midus_{model_type}",
        "memory": [entry.to_dict()],
    }


def _recipe(
    config: Path, tokenizer: Path, corpus: Path, output: Path, seed: int, arguments: argparse.Namespace
) -> str:
    options = {
        "model_config": config,
        "tokenizer": tokenizer,
        "output": output,
        "corpus": corpus,
        "trainable": "all",
        "sequence_length": _TOKENS,
        "batch_size": _SEQUENCES,
        "gradient_accumulation": 1,
        "max_steps": arguments.steps,
        "learning_rate": arguments.rate,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "warmup_ratio": 0.05,
        "min_learning_rate_ratio": 0.1,
        "precision": "fp32",
        "log_every": 20,
        "seed": seed,
    }
    return "".join(f"{key}: {value}\n" for key, value in options.items())


def _seconds(log: Path) -> float:
    events = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    return max(event["train_runtime"] for event in events if "train_runtime" in event)


if __name__ == "__main__":
    main()


_SHORTEST = 200  # characters; half of the articles are a title and nothing else


def split_articles(folder: Path) -> tuple[Path, Path]:
    """JSON lines to train on, and every tenth article, which is held out; both are written to a folder."""
    long_ones = [text for text in read_texts(articles()) if len(text) >= _SHORTEST]
    held_out = long_ones[::10]
    train = [text for index, text in enumerate(long_ones) if index % 10]
    return _write(folder / "train.jsonl", train), _write(folder / "held-out.jsonl", held_out)


def read_texts(path: Path) -> list[str]:
    """Return what rows of JSON lines have as `text`."""
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def _write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path
