"""Models of real sizes with random weights, from a config alone."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import midus_hf  # noqa: F401 - registers the classes that host memory
from benchmarks.models.points import CONFIGS
from midus_hf.memory.registry import MemoryModule
from upscalers.checkpoint.base_model import BaseModel, open_base
from upscalers.methods.contract import get_method
from upscalers.plan.plan import Base, Plan
from upscalers.request.options import parse_options

BASE = "base"
OWN_ORDER = ""
"""The placement of a method that orders the layers itself or adds none, and of the base."""


@dataclass(frozen=True)
class Variant:
    """One model of the comparison.

    Args:
        method: Name of an upscaling method, or `"base"`.
        placement: Of its new layers.
        config: Raw `config.json`.
        plan: Of its layers, which says what the base does not have.
        trained: `"new"` layers alone, or `"all"`.
    """

    method: str
    placement: str
    config: dict[str, Any]
    plan: Plan
    trained: Literal["new", "all"]

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.method} ({self.placement})" if self.placement else self.method

    @property
    def new_layers(self) -> list[int]:
        """Indices of the layers that the base does not have."""
        return self.plan.new_indices

    @property
    def architecture(self) -> str:
        """Equal for models whose layers are of the same kinds, as many of each: they read and generate alike."""
        memory = [{**entry, "layers": len(entry["layers"])} for entry in self.config.get("memory") or []]
        return json.dumps({**self.config, "memory": memory}, sort_keys=True)


def read_base(base: str) -> tuple[str, dict[str, Any]]:
    """Name and raw config of a base.

    Args:
        base: One of the configs kept here, or the path of a `config.json`.

    Raises:
        SystemExit: If there is no such config.
    """
    path = CONFIGS / f"{base}.json"
    if not path.is_file():
        path = Path(base)
        if not path.is_file():
            known = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.json")))
            raise SystemExit(f"base is {base!r}; expected one of {known}, or the path of a config.json.")
    name = path.parent.name if path.name == "config.json" else path.stem
    return name, json.loads(path.read_text(encoding="utf-8"))


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a model of the same kind that is as small as it can be, for a rehearsal."""
    heads, key_value_heads = (min(2, config[name]) for name in ("num_attention_heads", "num_key_value_heads"))
    return {
        **config,
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": heads,
        "num_key_value_heads": min(heads, key_value_heads),
        "head_dim": 16,
        "vocab_size": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def variants(config: dict[str, Any], methods: list[str], placements: list[str] | None) -> list[Variant]:
    """Every method at every placement that it takes, each once.

    Args:
        config: Raw config of the base.
        methods: Names; `"base"` for the base itself.
        placements: For methods that take one. Default: the method's own, and for memory top-heavy as well, where
            OpT-DeUS puts its layers.

    Raises:
        RequestError: If a method or placement is unknown or cannot be had.
    """
    found: dict[tuple[str, str], Variant] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        base = open_base(Path(folder), needs_weights=False)
        for name in methods:
            for placement in _placements(name, placements):
                variant = _variant(base, name, placement)
                found[variant.method, variant.placement] = variant
    return list(found.values())


def build(variant: Variant, dtype: str, device: str) -> PreTrainedModel:
    """A model with random weights; memories hold random values, so that no work is spared.

    Args:
        variant: Which model.
        dtype: Name of a torch dtype.
        device: `"cpu"` or `"cuda"`.
    """
    values = dict(variant.config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, MemoryModule):
                for name in module.names_of("value"):
                    getattr(module, name).normal_(0.0, 0.02)
    return model


def set_trained(model: PreTrainedModel, variant: Variant) -> list[torch.nn.Parameter]:
    """Let what the method trains have gradients, and nothing else; returns it."""
    model.requires_grad_(variant.trained == "all")
    for parameter in new_parameters(model, variant):
        parameter.requires_grad_(True)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def new_parameters(model: PreTrainedModel, variant: Variant) -> list[torch.nn.Parameter]:
    """What the base does not have: new layers, and memory that was attached."""
    return [parameter for name, parameter in model.named_parameters() if variant.plan.owns(name)]


def _placements(method: str, placements: list[str] | None) -> list[str | None]:
    if method == BASE or get_method(method).default_placement is None:
        return [None]
    if placements is not None:
        return list(placements)
    return [None, "top-heavy"] if method.startswith("midus-") else [None]


def _variant(base: BaseModel, name: str, placement: str | None) -> Variant:
    if name == BASE:
        layers = tuple(map(Base, range(base.num_layers)))
        return Variant(BASE, OWN_ORDER, dict(base.config), Plan(layers, base.num_layers), "all")
    method_class = get_method(name)
    method = method_class(parse_options(method_class.options_class, {}, name))
    method.check(base)
    plan = method.plan(base, None, placement)
    return Variant(
        method=name,
        placement=placement or method_class.default_placement or OWN_ORDER,
        config=method.config(base, plan),
        plan=plan,
        trained=method.trained,
    )
