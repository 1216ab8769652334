"""UltraMemV2 against a dense twin, from scratch: models of equal computation, trained on the same text in the same order.

    python -m experiments.from_scratch --work outputs/from-scratch
    python -m experiments.from_scratch --work outputs/from-scratch --seeds 0,1 --steps 1200

The twin has a wider feed-forward network, so that a forward pass of either model has the same number of floating-point
operations, to within one hidden unit (`midus flops`). The text is presidential addresses, with a tokenizer trained on
them. The loss is that of held-out addresses after every quarter of the run, so that a slow start shows. Every step is a
command that a person could type, and is skipped if its folder exists.
"""

import argparse
import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.study import Row, listed, run_columns, tell
from experiments.steps import FROM_NOTHING, loss_of, results_of, small_tokenizer, study, train_once
from material.addresses import addresses
from midus_hf.config.flops.model import estimate_flops
from midus_hf.config.memories.ultramem import UltraMemOptions
from midus_hf.config.memory_entries import MemoryEntry
from midus_hf.config.parameters import count_parameters

_VOCABULARY, _TOKENS, _SEQUENCES = 4096, 256, 16
_HIDDEN, _LAYERS, _HEADS, _INNER = 192, 6, 4, 384


def main() -> None:
    parser = study(__doc__)
    listed(parser, "--seeds", (0,))
    parser.add_argument("--steps", type=int, default=800, help="of 4,096 tokens (default: 800)")
    parser.add_argument("--rate", default="2e-3", help="maximum learning rate of both (default: 2e-3)")
    arguments = parser.parse_args()
    columns = {
        "model": "{variant}",
        "seed": "{seed}",
        "parameters": "{parameters:,}",
        "in tables": "{values:,}",
        "MFLOPs a token": lambda row: f"{row['flops_per_token'] / 1e6:.2f}",
        "tokens": "{trained_tokens:,}",
        "held-out loss": "{loss:.4f}",
    }
    tell(_rows(arguments), columns, results_of("from_scratch", arguments), run_columns())


def _configs() -> dict[str, dict[str, Any]]:
    """Return the config of each variant."""
    dense = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": _HIDDEN // _HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": _TOKENS,
        "initializer_range": round(math.sqrt(2 / (5 * _HIDDEN)), 6),
        "tie_word_embeddings": True,
        "vocab_size": _VOCABULARY,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    options = UltraMemOptions(n=128, k=32, key_width=_HIDDEN // 4, zero="none")
    entry = MemoryEntry(options, "beside-ffn", tuple(range(_LAYERS)), "ultramem")
    ultramem = {
        **dense,
        "architectures": ["MidusLlamaForCausalLM"],
        "model_type": "midus_llama",
        "memory": [entry.to_dict()],
    }
    return {"ultramem-v2": ultramem, "dense": _with_flops(dense, _flops_per_token(ultramem))}


def _with_flops(config: dict[str, Any], wanted: float) -> dict[str, Any]:
    """Return the config with the width of feed-forward network whose operations per token are nearest to `wanted`."""

    def wide(inner: int) -> dict[str, Any]:
        return {**copy.deepcopy(config), "intermediate_size": inner}

    slope = _flops_per_token(wide(1001)) - _flops_per_token(wide(1000))
    return wide(1000 + round((wanted - _flops_per_token(wide(1000))) / slope))


def _flops_per_token(config: dict[str, Any]) -> float:
    return estimate_flops(config, _TOKENS).forward / _TOKENS


def _rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for both models of each seed after every quarter of their runs."""
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    texts = (path.read_text(encoding="utf-8") for path in sorted(addresses().train.glob("*.txt")))
    tokenizer = small_tokenizer(work / "tokenizer", texts, _VOCABULARY)
    quarter = arguments.steps // 4
    for seed in map(int, arguments.seeds.split(",")):
        for variant, config in _configs().items():
            output, config_file, counts = (
                work / f"{variant}-{seed}",
                work / f"{variant}.json",
                count_parameters(config),
            )
            config_file.write_text(json.dumps(config, indent=2))
            train_once(output, _training(arguments, config_file, tokenizer, seed))
            for steps in (quarter, 2 * quarter, 3 * quarter, arguments.steps):
                model = output if steps == arguments.steps else output / f"checkpoint-{steps}"
                flags = ["--sequence-length", _TOKENS, "--max-tokens", 65536]
                yield {
                    "variant": variant,
                    "seed": seed,
                    "parameters": counts.total,
                    "values": counts.values,
                    "flops_per_token": _flops_per_token(config),
                    "trained_tokens": steps * _TOKENS * _SEQUENCES,
                    "loss": loss_of(model, addresses().held_out, *flags),
                }


def _training(arguments: argparse.Namespace, config: Path, tokenizer: Path, seed: int) -> dict[str, Any]:
    """Return the options of `midus train`, without its output."""
    rate = float(arguments.rate)
    return {
        "config_name": config,
        **FROM_NOTHING,
        "tokenizer_name": tokenizer,
        "corpus": addresses().train,
        "sequence_length": _TOKENS,
        "per_device_train_batch_size": _SEQUENCES,
        "max_steps": arguments.steps,
        "learning_rate": rate,
        "value_learning_rate": rate,
        "value_schedule": "fixed",
        "memory_keys": "weights",
        "value_weight_decay": 0.1,
        "save_steps": arguments.steps // 4,
        "save_total_limit": 4,
        "seed": seed,
    }


if __name__ == "__main__":
    main()
