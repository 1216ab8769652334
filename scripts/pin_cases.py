"""Cases of `scripts/pin.py`: every method on every family, options that change code, and methods one after the other."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

#: All families that methods accept.
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "olmo2")

# Families of variants: llama, and gemma3, which has sliding windows and norms behind attention and feed-forward
# network.
FEW_FAMILIES = ("llama", "gemma3")

# A method and its options.
Step = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A model that is pinned.

    Args:
        family: Family of the base.
        name: Name of the case within the family.
        steps: Methods with their options; each upscales the result of the one before.
        base: Fields of the base's config that differ from `tests/tiny.py`. Default: none.
        from_scratch: Whether to make a new model from the last result's config, without its weights. Default: False.
        changes: Changes of the only memory in that config. Default: none.
        by_trainer: Whether a `MemoryTrainer` makes the three steps, instead of a loop. Default: False.
    """

    family: str
    name: str
    steps: tuple[Step, ...]
    base: dict[str, Any] = field(default_factory=dict)
    from_scratch: bool = False
    changes: dict[str, Any] = field(default_factory=dict)
    by_trainer: bool = False

    def __str__(self) -> str:
        return f"{self.family} {self.name}"

    @property
    def fetches(self) -> bool:
        """True if texts fetch blocks by ids that a forward pass takes."""
        return any("branching" in options and "without_ids" not in options for _, options in self.steps)


SLICES = [{"layers": [0, 3]}, {"layers": [1, 4], "scale": {"down": 0.5}}, {"layers": [3, 4]}]
SIZES = {"sizes": [3, 0, 2], "branching": 3}
# Options of every method, with small sizes. Every family has a case for each method.
METHODS: dict[str, dict[str, Any]] = {
    "attenuated-copy": {},
    "avg-deus": {},
    "hier-ffn": SIZES,
    "hier-kv": SIZES,
    "hier-lora-ffn": SIZES,
    "hier-lora-qk": SIZES,
    "hier-lora-vo": SIZES,
    "lesa": {"epochs": 1},
    "linear-combination": {"coefficients": {"previous": 0.5, "next": 0.75, "previous-1": -0.25}},
    "llama-pro": {},
    "midus-hml": {"n": 8, "k": 2},
    "midus-linear": {"slots": 12, "k": 2},
    "midus-pkm": {"n": 8, "k": 2},
    "moc": {"memory_tokens": 24, "chapters": 12, "k": 2, "chunk_size": 3},
    "moda": {},
    "opt-deus": {},
    "slices": {"slices": SLICES},
    "solar": {},
    "ultramem-v2": {"n": 8, "k": 4},
}

# Options, by method, that change what a checkpoint needs or computes; they are added to those in `METHODS`.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "avg-deus": [{"identity": "auto"}, {"identity": "zero_out_proj"}, {"neighbours": "same_type"}],
    "hier-ffn": [{"without_ids": "generic"}, {"layers": [1, 3]}],
    "hier-kv": [{"without_ids": "generic"}],
    "hier-lora-ffn": [{"alpha": 1.5}],
    "lesa": [{"identity": "auto"}, {"norm_init": "mean"}],
    "linear-combination": [{"identity": "auto"}],
    "llama-pro": [{"identity": "zero_out_proj"}],
    "midus-hml": [
        {"values": "shared"},
        {"values": "own"},
        {"output_projection": True},
        {"output_projection": True, "inner_residual": True},
        {"inner_residual": True},
        {"query_norm": "batch"},
        {"query_norm": "layer", "temperature": 0.25},
        {"gate": "token"},
        {"gate": "head", "output_projection": True},
        {"gate": "head", "values": "own", "query_norm": "batch"},
        {"addressing": "random"},
    ],
    "midus-linear": [{"query_norm": "none", "inner_residual": False}, {"query_norm": "layer", "gate": "token"}],
    "midus-pkm": [
        {"query_norm": "none", "inner_residual": False},
        {"query_norm": "layer", "gate": "token", "temperature": 2.0},
        {"addressing": "random"},
    ],
    "moc": [
        {"layers": "all"},
        {"layers": 3, "share": "every:2"},
        {"layers": "all", "share": "none"},
        {"layers": 3, "bank_rank": 5},
        {"routing": "prompt"},
        {"routing": "token"},
        {"routing": "sequence"},
        {"first_chunk": 2, "site": "behind-layer"},
        {"weighting": "logit_bias", "kv_heads": 2, "routing": "token"},
        {"weighting": "paper", "normalise": False},
        {"bank_width": 16, "heads": 2},
        {"balance": "per-choice"},
        {"balance": "released", "shared_chapters": 2},
        {"addressing": "random"},
    ],
    "moda": [
        {"joining": "interpolated", "attention_slots": "reused"},
        {"joining": "interpolated", "attention_slots": "reused", "ffn_slots": False},
        {"bias": True},
        {"attention_slots": "projected", "bias": True},
        {"joining": "interpolated", "attention_slots": "reused", "rope": "released"},
        {"attention_slots": "projected", "slots": 3},
        {"layers": [0, 2, 3]},
    ],
    "opt-deus": [
        {"identity": "none", "solver": "hungarian"},
        {"plan_scale": "raw", "mlp_t_in": "residual_mean"},
    ],
    "slices": [{"trainable": "new"}],
    "ultramem-v2": [
        {"zero": "projection"},
        {"share": "all"},
        {"share": "ring:4"},
        {"key_pairs": 2},
        {"rank": 1, "scoring": "sum"},
        {"heads": 2, "rank": 3, "activation": "gelu", "side_k": 5},
        {"activation": "silu", "weights": "softmax", "output_gate": True},
        {"pre_value_width": 0},
        {"site": "skip", "span": 2},
        {"preset": "memory-plus", "n": 8, "k": 3, "key_width": 4},
        {"balance_coef": 0.1, "penalty_coef": 0.1, "penalty_margin": 0.0},
        {"addressing": "random"},
    ],
}

# Methods that are applied one after the other.
STACKS = [
    ("llama-pro", "midus-hml"),
    ("midus-hml", "moc"),
    ("midus-pkm", "midus-hml"),
    ("moda", "ultramem-v2"),
    ("moc", "moda"),
    ("hier-ffn", "hier-kv"),
    ("hier-lora-vo", "midus-linear"),
    ("solar", "ultramem-v2", "moc", "moda"),
]

# Models made from a config alone: the config of a method's result, with these changes of its memory.
FROM_SCRATCH: list[Step] = [
    ("midus-hml", {}),
    ("midus-linear", {}),
    ("moc", {}),
    ("moda", {}),
    ("moda", {"joining": "joint", "attention_slots": "reused"}),
    ("moda", {"joining": "joint", "attention_slots": "reused", "rope": "released"}),
    ("moda", {"attention_slots": "reused"}),
    ("ultramem-v2", {}),
    ("ultramem-v2", {"zero": "none"}),
    ("ultramem-v2", {"zero": "none", "key_pairs": 2, "rank": 3, "share": "ring:2"}),
]

# Methods whose default is also trained by `MemoryTrainer`. (`hier-*` always is: its blocks are no parameters.)
BY_TRAINER = ("llama-pro", "midus-hml", "midus-linear", "midus-pkm", "moc", "moda", "solar", "ultramem-v2")


def all_cases() -> Iterator[Case]:
    """Yield every case."""
    for family in FAMILIES:
        for method, options in METHODS.items():
            yield Case(family, method, ((method, options),), by_trainer=method.startswith("hier-"))
    for family in FEW_FAMILIES:
        for method, variants in VARIANTS.items():
            for changes in variants:
                # An inner residual needs heads that are together as wide as the hidden state.
                base = {"head_dim": 8} if method == "midus-hml" and "inner_residual" in changes else {}
                step = (method, {**METHODS[method], **changes})
                yield Case(family, f"{method} {_words(changes)}", (step,), base, by_trainer=method.startswith("hier-"))
        for methods in STACKS:
            steps = tuple((method, METHODS[method]) for method in methods)
            yield Case(family, " + ".join(methods), steps, by_trainer=methods[0].startswith("hier-"))
        for method, changes in FROM_SCRATCH:
            name = f"{method} from scratch {_words(changes)}".rstrip()
            yield Case(family, name, ((method, METHODS[method]),), from_scratch=True, changes=changes)
        for method in BY_TRAINER:
            yield Case(family, f"{method} by MemoryTrainer", ((method, METHODS[method]),), by_trainer=True)


def _words(options: dict[str, Any]) -> str:
    return ",".join(f"{key}={json.dumps(value)}".replace('"', "") for key, value in options.items())
