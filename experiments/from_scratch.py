"""UltraMemV2 against a dense twin, both from the beginning: models of equal computation, trained on the same text in the same order.

    python -m experiments.from_scratch --work outputs/from-scratch
    python -m experiments.from_scratch --work outputs/from-scratch --seeds 0,1 --steps 1200

The twin has a wider feed-forward network, so that a forward pass of both has as many floating-point operations, to one hidden unit
(`midus-flops`). The text are presidential addresses, with a tokenizer that is trained on them; the loss is that of held-out addresses
after every quarter of the run, so that a slow start shows. Every step is a command that a person would type, and is skipped where its
folder is there.
"""

import argparse
import copy
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.commands import run_command
from benchmarks.tracked import Run, append, this_run
from experiments.small_tokenizer import small_tokenizer
from material.addresses import addresses
from midus_hf.config.flops.model import estimate_flops
from midus_hf.config.memories.ultramem import UltraMemOptions
from midus_hf.config.memory_entries import MemoryEntry
from midus_hf.config.parameters import count_parameters

FROM_SCRATCH_RESULTS = Path(__file__).parent / "results" / "from_scratch.csv"
_VOCABULARY, _TOKENS, _SEQUENCES = 4096, 256, 16
_HIDDEN, _LAYERS, _HEADS, _INNER = 192, 6, 4, 384


@dataclass(frozen=True)
class Row(Run):
    """One model after one run; the loss of held-out text in nats per token."""

    arm: str
    seed: int
    parameters: int
    values: int
    flops_per_token: float
    trained_tokens: int
    loss: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models, which a later run goes on with")
    parser.add_argument("--seeds", default="0", help="joined by commas (default: 0)")
    parser.add_argument("--steps", type=int, default=800, help="of 4,096 tokens (default: 800)")
    parser.add_argument("--rate", default="2e-3", help="maximum learning rate of both (default: 2e-3)")
    parser.add_argument("--no-append", action="store_true", help="print alone")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    texts = (path.read_text(encoding="utf-8") for path in sorted(addresses().train.glob("*.txt")))
    tokenizer = small_tokenizer(arguments.work / "tokenizer", texts, _VOCABULARY)
    run = this_run("cpu")
    print("| model | seed | parameters | in tables | MFLOPs a token | tokens | held-out loss |")
    print("|---|---|---|---|---|---|---|")
    for seed in map(int, arguments.seeds.split(",")):
        for arm, config in _configs().items():
            for row in _measured(run, arm, config, seed, tokenizer, arguments):
                print(
                    f"| {row.arm} | {row.seed} | {row.parameters:,} | {row.values:,} | {row.flops_per_token / 1e6:.2f} | "
                    f"{row.trained_tokens:,} | {row.loss:.4f} |",
                    flush=True,
                )
                if not arguments.no_append:
                    append([row], FROM_SCRATCH_RESULTS)


def _configs() -> dict[str, dict[str, Any]]:
    """The config of each arm."""
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
    """The config with the feed-forward network that brings its operations nearest to what is wanted."""

    def wide(inner: int) -> dict[str, Any]:
        return {**copy.deepcopy(config), "intermediate_size": inner}

    slope = _flops_per_token(wide(1001)) - _flops_per_token(wide(1000))
    return wide(1000 + round((wanted - _flops_per_token(wide(1000))) / slope))


def _flops_per_token(config: dict[str, Any]) -> float:
    return estimate_flops(config, _TOKENS).forward / _TOKENS


def _measured(
    run: Run, arm: str, config: dict[str, Any], seed: int, tokenizer: Path, arguments: argparse.Namespace
) -> list[Row]:
    work: Path = arguments.work
    (work / f"{arm}.json").write_text(json.dumps(config, indent=2))
    counts, rows = count_parameters(config), []
    output = work / f"{arm}-{seed}"
    if not (output / "config.json").is_file():
        run_command("midus-train", *_training(arguments, work / f"{arm}.json", tokenizer, output, seed))
    quarter = arguments.steps // 4
    for steps in (quarter, 2 * quarter, 3 * quarter, arguments.steps):
        folder = output if steps == arguments.steps else output / f"checkpoint-{steps}"
        words = [folder, "--json", "--sequence-length", _TOKENS, "--max-tokens", 65536, "--text", addresses().held_out]
        told = json.loads(run_command("midus-eval", *words))["models"][0]["perplexity"]["perplexity"]
        rows.append(
            Row(
                **asdict(run),
                arm=arm,
                seed=seed,
                parameters=counts.total,
                values=counts.values,
                flops_per_token=_flops_per_token(config),
                trained_tokens=steps * _TOKENS * _SEQUENCES,
                loss=math.log(told),
            )
        )
    return rows


def _training(
    arguments: argparse.Namespace, config: Path, tokenizer: Path, output: Path, seed: int
) -> list[str | Path]:
    options = {
        "model_config": config,
        "tokenizer": tokenizer,
        "output": output,
        "corpus": addresses().train,
        "trainable": "all",
        "sequence_length": _TOKENS,
        "batch_size": _SEQUENCES,
        "gradient_accumulation": 1,
        "max_steps": arguments.steps,
        "learning_rate": arguments.rate,
        "value_learning_rate": arguments.rate,
        "value_schedule": "fixed",
        "memory_keys": "weights",
        "weight_decay": 0.1,
        "value_weight_decay": 0.1,
        "adam_beta2": 0.95,
        "warmup_ratio": 0.05,
        "min_learning_rate_ratio": 0.1,
        "precision": "fp32",
        "save_every": arguments.steps // 4,
        "keep_checkpoints": 4,
        "log_every": 20,
        "seed": seed,
    }
    recipe = config.parent / "recipe.yaml"
    recipe.write_text("".join(f"{key}: {value}\n" for key, value in options.items()))
    return [recipe]


if __name__ == "__main__":
    main()
