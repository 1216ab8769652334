"""Attention over the depth against none, from scratch: tables 3 and 6 of Mixture-of-Depths Attention at a small scale.

    python -m experiments.depth_from_scratch --work outputs/depth-from-scratch
    python -m experiments.depth_from_scratch --work outputs/depth-from-scratch --layers 24 --seeds 0,1,2 --steps 2000

Three variants are trained with norms before each sublayer (Llama), and three with norms after it (OLMo 2): without
slots, with the slots that attention writes, and with these and additional slots that are projected for the feed-forward
network. OLMo 2 applies its norms to the outputs of attention and of the feed-forward network, inside the residual
branch, and to queries and keys. Among the families here, this is the nearest to the paper's post-norm, which is
`x = LN(x + f(x))`.

All models of a seed read the same Wikipedia articles in the same order, so each is compared with the seed's model
without slots. The loss is that of every tenth article, which no model trains on. Every step is a command that a person
could type. Steps whose results are in the folder are not repeated; their rows are printed but not appended again.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report.rows import table
from benchmarks.study import Row, keep, listed, run_columns
from experiments.steps import (
    FROM_NOTHING,
    events_of,
    loss_of,
    read_rows,
    remembered,
    results_of,
    small_tokenizer,
    study,
    train_once,
    write_rows,
)
from material.articles import articles
from midus_hf.config.flops.model import estimate_flops
from midus_hf.config.memories.depth_attention import DepthAttentionOptions
from midus_hf.config.memory_entries import MemoryEntry
from midus_hf.config.parameters import count_parameters

_VOCABULARY, _TOKENS, _SEQUENCES = 2048, 128, 8
_HIDDEN, _INNER, _HEADS, _KEY_VALUE_HEADS = 96, 256, 6, 2

# Class and model type of the family with norms at this position.
NORMS = {"pre": ("Llama", "llama"), "post": ("Olmo2", "olmo2")}

# Slots that later layers read.
SLOTS = ("none", "attention", "attention+ffn")

VARIANTS = {f"{norms}-{slots}": (norms, slots) for norms in NORMS for slots in SLOTS}


_SHORTEST = 200  # characters; half of the articles are a title and nothing else


def main() -> None:
    parser = study(__doc__)
    listed(parser, "--variants", VARIANTS)
    listed(parser, "--seeds", (0, 1))
    parser.add_argument("--layers", type=int, default=12, help="of each model (default: 12)")
    parser.add_argument("--steps", type=int, default=320, help="of 1,024 tokens (default: 320)")
    parser.add_argument("--rate", default="3e-3", help="maximum learning rate of all (default: 3e-3)")
    parser.add_argument("--max-tokens", type=int, default=32768, help="of held-out text (default: 32768)")
    arguments = parser.parse_args()
    rows, run = [], run_columns()
    for row, is_new in _rows(arguments):
        rows.append(row)
        if is_new:
            keep(row, results_of("depth_from_scratch", arguments), run)
    print(table_of(rows))


def table_of(rows: Sequence[Row]) -> str:
    """Return a Markdown table of means over seeds, with the lowest and highest value.

    Differences are from the same seed's model without slots.
    """
    header = ["norms", "slots", "parameters", "MFLOPs a token", "seconds", "held-out loss", "difference"]
    lines = []
    vanilla = {(row["norms"], row["seed"]): row["loss"] for row in rows if row["slots"] == "none"}
    for norms, slots in dict.fromkeys((row["norms"], row["slots"]) for row in rows):
        of_variant = [row for row in rows if (row["norms"], row["slots"]) == (norms, slots)]
        pairs = [(row["loss"], vanilla.get((norms, row["seed"]))) for row in of_variant if slots != "none"]
        differences = [loss - without for loss, without in pairs if without is not None]
        line = [
            norms,
            slots,
            f"{of_variant[0]['parameters']:,}",
            f"{of_variant[0]['flops_per_token'] / 1e6:.2f}",
            f"{statistics.mean(row['seconds'] for row in of_variant):.0f}",
            _with_range([row["loss"] for row in of_variant], "{:.4f}"),
            _with_range(differences, "{:+.4f}") if differences else "",
        ]
        lines.append(line)
    return table(header, lines)


def _with_range(numbers: list[float], form: str) -> str:
    text = form.format(statistics.mean(numbers))
    return f"{text} ({form.format(min(numbers))} to {form.format(max(numbers))})" if len(numbers) > 1 else text


def _rows(arguments: argparse.Namespace) -> Iterator[tuple[Row, bool]]:
    """Yield the row of every model, and whether it was measured now."""
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    train, held_out = split_articles(work)
    tokenizer = small_tokenizer(work / "tokenizer", (row["text"] for row in read_rows(train)), _VOCABULARY)
    for seed in map(int, arguments.seeds.split(",")):
        for variant in arguments.variants.split(","):
            model = work / f"{variant}-{arguments.layers}-{arguments.steps}-{arguments.rate}-{seed}"

            def measure(variant: str = variant, seed: int = seed, model: Path = model) -> Row:
                norms, slots = VARIANTS[variant]
                config = config_of(norms, slots, arguments.layers)
                _train(model, config, tokenizer, train, seed, arguments)
                runtimes = [event["train_runtime"] for event in events_of(model) if "train_runtime" in event]
                flags = ["--sequence-length", _TOKENS, "--max-tokens", arguments.max_tokens]
                return {
                    "norms": norms,
                    "slots": slots,
                    "layers": arguments.layers,
                    "seed": seed,
                    "parameters": count_parameters(config).total,
                    "flops_per_token": estimate_flops(config, _TOKENS).forward / _TOKENS,
                    "trained_tokens": arguments.steps * _TOKENS * _SEQUENCES,
                    "seconds": max(runtimes),
                    "loss": loss_of(model, held_out, *flags),
                }

            yield remembered(work / f"{model.name}.row.json", measure)


def config_of(norms: str, slots: str, layers: int) -> dict[str, Any]:
    """Return the config of one model."""
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


def _train(
    output: Path, config: dict[str, Any], tokenizer: Path, corpus: Path, seed: int, arguments: argparse.Namespace
) -> None:
    config_file = output.with_name(f"{output.name}.config.json")
    config_file.write_text(json.dumps(config, indent=2), encoding="utf-8")
    options = {
        "config_name": config_file,
        **FROM_NOTHING,
        "tokenizer_name": tokenizer,
        "corpus": corpus,
        "sequence_length": _TOKENS,
        "per_device_train_batch_size": _SEQUENCES,
        "max_steps": arguments.steps,
        "learning_rate": float(arguments.rate),
        "seed": seed,
    }
    train_once(output, options)


def split_articles(folder: Path) -> tuple[Path, Path]:
    """Write the articles to train on, and every tenth article, held out, to a folder as JSON lines; return both paths."""
    long_ones = [{"text": row["text"]} for row in read_rows(articles()) if len(row["text"]) >= _SHORTEST]
    train = [row for index, row in enumerate(long_ones) if index % 10]
    return write_rows(folder / "train.jsonl", train), write_rows(folder / "held-out.jsonl", long_ones[::10])


if __name__ == "__main__":
    main()
