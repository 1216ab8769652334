"""The table of methods: every kind of model that they make, small, and requests to dense ones."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models.memory_models import IDS, fill
from tiny import NATIVE_FAMILIES

from midus_hf.files.checkpoint_files import BANKS_FOLDER
from midus_hf.memories.hierarchical.bank import MemoryBank
from midus_hf.memories.hierarchical.options import block_layouts
from tests.upscalers.checkpoints import SMALL
from tests.upscalers.contents import config_of, load
from upscalers.architecture.layer_tensors import family_of
from upscalers.architecture.layout import layout_of
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.methods.contract import get_method
from upscalers.plan import Plan, follow_plan
from upscalers.record.provenance import UpscaleReport
from upscalers.request import parse_options
from upscalers.runs.upscale import upscale

# Keyword arguments of `upscale` by method. All keep every layer of a base of four as it was.
REQUESTS: dict[str, dict[str, Any]] = {
    "solar": {}, "llama-pro": {}, "avg-deus": {}, "lesa": {"options": {"epochs": 1}}, "opt-deus": {},
    "stack": {"options": {"layers": ["0-1", "0-3", 2]}},
}  # fmt: skip
# Methods with the option `identity`, and its default.
PROMISING = {"llama-pro": "auto", "opt-deus": "auto", "lesa": "none", "avg-deus": "none"}
# Families with norms after attention and feed-forward network.
OUTPUT_NORMS = ("gemma2", "gemma3", "olmo2")
SMALL_CHAPTERS = {"memory_tokens": 24, "chapters": 12, "k": 2, "chunk_size": 3}
SMALL_TABLES = {"n": 8, "k": 4}
SMALL_TREE = {"sizes": [3, 0, 2], "branching": 3}
_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "midus-hml": (SMALL["midus-hml"], {
        "": {},
        "output projection": {"output_projection": True},
        "output projection and residual": {"output_projection": True, "inner_residual": True},
        "batch norm": {"query_norm": "batch"}}),
    "midus-pkm": (SMALL["midus-pkm"], {"": {}, "bare": {"query_norm": "none", "inner_residual": False}}),
    "midus-linear": (SMALL["midus-linear"], {"": {}, "layer norm": {"query_norm": "layer"}}),
    "moc": (SMALL_CHAPTERS, {
        "": {}, "own": {"share": "none", "site": "behind-layer"}, "neighbours": {"share": "every:2", "layers": 3},
        "per token": {"routing": "token"}, "per sequence": {"routing": "sequence"}}),
    "ultramem-v2": (SMALL_TABLES, {
        "": {}, "zero projection": {"zero": "projection"}, "ring": {"share": "ring:4"},
        "no square": {"share": "ring:2", "layers": [0, 1, 3]},
        "heads, no pre-values": {"heads": 2, "rank": 3, "pre_value_width": 0}, "skip": {"site": "skip", "span": 2}}),
    # Bases of the table have no tokenizer.
    "engram": ({"rows": 199, "width": 16, "hash_heads": 4, "compress": False}, {
        "": {}, "no convolution, one order": {"kernel": 0, "max_order": 2}, "behind layers": {"site": "behind-layer"}}),
    "moda": ({}, {
        "": {},
        "reused": {"joining": "interpolated", "attention_slots": "reused"},
        "attention": {"joining": "interpolated", "attention_slots": "reused", "ffn_slots": False},
        "projected": {"attention_slots": "projected", "bias": True},
        "some": {"layers": [0, 2, 3]}}),
    **{f"hier-{kind}": (SMALL_TREE, {"": {}}) for kind in ("ffn", "kv", "lora-qk", "lora-vo", "lora-ffn")},
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    f"{method}, {name}" if name else method: {"method": method, "options": {**small, **options}}
    for method, (small, kinds) in _OPTIONS.items()
    for name, options in kinds.items()
}
# Methods whose memories retrieve rows, and the options of their null control of one row.
RETRIEVING = {
    "midus-hml": {"n": 1, "k": 1}, "midus-pkm": {"n": 1, "k": 1}, "midus-linear": {"slots": 1, "k": 1},
    "moc": {"memory_tokens": 1, "chapters": 1, "shared_chapters": 0, "k": 1}, "ultramem-v2": {"n": 1, "k": 1, "share": "none"},
}  # fmt: skip


def with_options(method: str, **options: Any) -> dict[str, Any]:
    return {"method": method, "options": {**KINDS[method]["options"], **options}}


KINDS |= {
    **{f"midus-hml at {at}": {**KINDS["midus-hml"], "placement": at} for at in ("top-heavy", "bottom-heavy", "0,1,4,7,8,9")},
    **{method: {"method": method, **request} for method, request in REQUESTS.items()},
    **{f"llama-pro at {at}": {"method": "llama-pro", "placement": at} for at in ("distributed", "0,1,2,7,8")},
    **{
        f"{method}, {identity}": {"method": method, "options": {**REQUESTS[method].get("options", {}), "identity": identity}}
        for method, default in PROMISING.items()
        for identity in ("zero_out_proj", "auto")
        if identity != default
    },
    **{
        f"{method}, none": {"method": method, "options": {**REQUESTS[method].get("options", {}), "identity": "none"}}
        for method, default in PROMISING.items()
        if default != "none"
    },
    **{f"{method}, random slots": with_options(method, addressing="random") for method in RETRIEVING},
    **{f"{method}, one row": with_options(method, **one_row) for method, one_row in RETRIEVING.items()},
    "stack, another order": {"method": "stack", "options": {"layers": ["2-3", "0-2"]}},
}  # fmt: skip
"""Keyword arguments of `upscale`, by a name for what they make."""
# Kinds that do not compute what their base computes.
DIFFERING = ("solar", "stack", "stack, another order", "avg-deus", "lesa", "llama-pro, none", "opt-deus, none")
# One kind of each method.
PLAIN = [name for name in KINDS if name == KINDS[name]["method"]]


def arguments_of(name: str) -> list[str]:
    """Return the same request in words of the command `upscale`."""
    kind = KINDS[name]
    settings = [f"{key}={json.dumps(value)}" for key, value in kind.get("options", {}).items()]
    placed = ["--placement", kind["placement"]] if "placement" in kind else []
    return ["--method", kind["method"], *placed, *(word for setting in settings for word in ("--set", setting))]


@dataclass(frozen=True)
class Made:
    kind: str
    base: Path
    output: Path
    report: UpscaleReport

    @property
    def config(self) -> dict[str, Any]:
        return config_of(self.output)


def memory_ids(model: Any) -> dict[str, torch.Tensor]:
    """Return what a forward pass needs to fetch blocks, where the model has a bank of blocks."""
    has_memory = model.config.to_dict().get("memory")
    return {"memory_ids": IDS} if has_memory and block_layouts(model.config.memories()) else {}


def trained(folder: Path, output: Path) -> Path:
    """Let all that is new in a model act, and save the model as training saves it."""
    model = load(folder)
    record, generator = model.config.upscale, torch.Generator().manual_seed(3)
    new = [f".layers.{layer}." for layer in record["new_layers"]]
    new += [f".{at}.{name}." for name in record.get("new_memories", []) for at in ("memories", "memory_tables")]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in new):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(output)
    for name, layout in (block_layouts(model.config.memories()) if memory_ids(model) else {}).items():
        fill(MemoryBank(output / BANKS_FOLDER / name, layout), but=((1, 0), (3, 2)))
    return output


def upscaled(base: Path, output: Path, method: str, verify: bool = False, **changes: Any) -> UpscaleReport:
    """Send the method's plain request, with changes."""
    return upscale(base=base, method=method, output=output, **{**REQUESTS[method], "verify": verify, **changes})


def known(config: dict[str, Any]) -> BaseCheckpoint:
    family = family_of(config)
    return BaseCheckpoint(Path(), config, family, layout_of(config), {})


def planned(config: dict[str, Any], method: str, num_new_layers=None, placement=None, **options: Any) -> Plan:
    chosen = get_method(method)
    return chosen(parse_options(chosen.options_class, options, method)).plan(known(config), num_new_layers, placement)


def upscaled_config(config: dict[str, Any], method: str, options=None, **place: Any) -> dict[str, Any]:
    """The raw config of the model that a dense method makes, from that of the base."""
    return follow_plan(known(config), planned(config, method, **place, **(options or {})))


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    return NATIVE_FAMILIES[family].config(**changes).to_dict()
