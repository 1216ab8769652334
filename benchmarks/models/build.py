"""Build models of real sizes with random weights, from a config alone."""

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
# Placement of the base, and of a method that orders the layers itself or adds none.
OWN_ORDER = ""


@dataclass(frozen=True)
class Variant:
    """Model of the comparison: the base or a method at a placement, empty if the method takes none.

    `config` is as in `config.json`, and `plan` knows the tensors that the base does not have. All parameters train, or new ones
    alone.
    """

    method: str
    placement: str
    config: dict[str, Any]
    plan: Plan
    trained: Literal["new", "all"]

    @property
    def name(self) -> str:
        """Name of the model in messages."""
        return f"{self.method} ({self.placement})" if self.placement else self.method

    @property
    def new_layers(self) -> list[int]:
        """Indices of the layers that the base does not have."""
        return self.plan.new_indices

    @property
    def architecture(self) -> str:
        """Text that is equal for models with equal numbers of layers of each kind, which read and generate alike."""
        memory = [{**entry, "layers": len(entry["layers"])} for entry in self.config.get("memory") or []]
        return json.dumps({**self.config, "memory": memory}, sort_keys=True)


def read_base(base: str) -> tuple[str, dict[str, Any]]:
    """Read the name and the raw config of a base."""
    path = CONFIGS / f"{base}.json"
    if not path.is_file():
        path = Path(base)
        if not path.is_file():
            known = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.json")))
            raise SystemExit(f"base is {base!r}; expected one of {known}, or the path of a config.json.")
    name = path.parent.name if path.name == "config.json" else path.stem
    return name, json.loads(path.read_text(encoding="utf-8"))


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a tiny model of the same kind, for a rehearsal."""
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
    """Return a variant for every method and placement, each once."""
    by_name: dict[tuple[str, str], Variant] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        base = open_base(Path(folder), needs_weights=False)
        for name in methods:
            for placement in _placements(name, placements):
                variant = _variant(base, name, placement)
                by_name[variant.method, variant.placement] = variant
    return list(by_name.values())


def build(variant: Variant, dtype: str, device: str) -> PreTrainedModel:
    """Build a model with random weights. Memories hold random values, because zero values might save work."""
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
    """Give gradients to the parameters that the method trains, and to no others; return these parameters."""
    model.requires_grad_(variant.trained == "all")
    for parameter in new_parameters(model, variant):
        parameter.requires_grad_(True)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def new_parameters(model: PreTrainedModel, variant: Variant) -> list[torch.nn.Parameter]:
    """Return the parameters that the base does not have: new layers and attached memory."""
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
