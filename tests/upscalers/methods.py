"""The table of methods: every kind of model that they make, small, and requests to dense ones."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # which pytest has on its path
    sys.path.insert(0, "tests")

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
# Methods with the option `identity`.
PROMISING = ("llama-pro", "opt-deus", "lesa", "avg-deus")
# Families with norms after attention and feed-forward network.
OUTPUT_NORMS = ("gemma2", "gemma3", "olmo2")
SMALL_CHAPTERS = {"memory_tokens": 24, "chapters": 12, "k": 2, "chunk_size": 3}
SMALL_TABLES = {"n": 8, "k": 4}
SMALL_TREE = {"sizes": [3, 0, 2], "branching": 3}
# Options of every kind of a method, unless the kind says otherwise. Bases of the table have no tokenizer.
_OPTIONS: dict[str, dict[str, Any]] = {
    **SMALL, "moc": SMALL_CHAPTERS, "ultramem-v2": SMALL_TABLES,
    "engram": {"rows": 199, "width": 16, "hash_heads": 4, "compress": False},
    "hier-ffn": SMALL_TREE, "hier-kv": SMALL_TREE,
    "hier-lora-qk": SMALL_TREE, "hier-lora-vo": SMALL_TREE, "hier-lora-ffn": SMALL_TREE,
    "lesa": REQUESTS["lesa"]["options"], "stack": REQUESTS["stack"]["options"],
}  # fmt: skip


def kind(method: str, placement: str | None = None, **options: Any) -> dict[str, Any]:
    """Return keyword arguments of `upscale`."""
    place = {} if placement is None else {"placement": placement}
    return {"method": method, "options": {**_OPTIONS.get(method, {}), **options}, **place}


KINDS: dict[str, dict[str, Any]] = {
    "midus-hml": kind("midus-hml"),
    "midus-hml, output projection": kind("midus-hml", output_projection=True),
    "midus-hml, output projection and residual": kind("midus-hml", output_projection=True, inner_residual=True),
    "midus-hml, batch norm": kind("midus-hml", query_norm="batch"),
    "midus-pkm": kind("midus-pkm"),
    "midus-pkm, bare": kind("midus-pkm", query_norm="none", inner_residual=False),
    "midus-linear": kind("midus-linear"),
    "midus-linear, layer norm": kind("midus-linear", query_norm="layer"),
    "moc": kind("moc"),
    "moc, own": kind("moc", share="none", site="behind-layer"),
    "moc, neighbours": kind("moc", share="every:2", layers=3),
    "moc, per token": kind("moc", routing="token"),
    "moc, per sequence": kind("moc", routing="sequence"),
    "ultramem-v2": kind("ultramem-v2"),
    "ultramem-v2, zero projection": kind("ultramem-v2", zero="projection"),
    "ultramem-v2, ring": kind("ultramem-v2", share="ring:4"),
    "ultramem-v2, no square": kind("ultramem-v2", share="ring:2", layers=[0, 1, 3]),
    "ultramem-v2, heads, no pre-values": kind("ultramem-v2", heads=2, rank=3, pre_value_width=0),
    "ultramem-v2, skip": kind("ultramem-v2", site="skip", span=2),
    "engram": kind("engram"),
    "engram, no convolution, one order": kind("engram", kernel=0, max_order=2),
    "engram, behind layers": kind("engram", site="behind-layer"),
    "moda": kind("moda"),
    "moda, reused": kind("moda", joining="interpolated", attention_slots="reused"),
    "moda, attention": kind("moda", joining="interpolated", attention_slots="reused", ffn_slots=False),
    "moda, projected": kind("moda", attention_slots="projected", bias=True),
    "moda, some": kind("moda", layers=[0, 2, 3]),
    "hier-ffn": kind("hier-ffn"),
    "hier-kv": kind("hier-kv"),
    "hier-lora-qk": kind("hier-lora-qk"),
    "hier-lora-vo": kind("hier-lora-vo"),
    "hier-lora-ffn": kind("hier-lora-ffn"),
    "midus-hml at top-heavy": kind("midus-hml", "top-heavy"),
    "midus-hml at bottom-heavy": kind("midus-hml", "bottom-heavy"),
    "midus-hml at 0,1,4,7,8,9": kind("midus-hml", "0,1,4,7,8,9"),
    "solar": kind("solar"),
    "llama-pro": kind("llama-pro"),
    "avg-deus": kind("avg-deus"),
    "lesa": kind("lesa"),
    "opt-deus": kind("opt-deus"),
    "stack": kind("stack"),
    "llama-pro at distributed": kind("llama-pro", "distributed"),
    "llama-pro at 0,1,2,7,8": kind("llama-pro", "0,1,2,7,8"),
    "llama-pro, zero_out_proj": kind("llama-pro", identity="zero_out_proj"),
    "opt-deus, zero_out_proj": kind("opt-deus", identity="zero_out_proj"),
    "lesa, zero_out_proj": kind("lesa", identity="zero_out_proj"),
    "lesa, auto": kind("lesa", identity="auto"),
    "avg-deus, zero_out_proj": kind("avg-deus", identity="zero_out_proj"),
    "avg-deus, auto": kind("avg-deus", identity="auto"),
    "llama-pro, none": kind("llama-pro", identity="none"),
    "opt-deus, none": kind("opt-deus", identity="none"),
    "midus-hml, random slots": kind("midus-hml", addressing="random"),
    "midus-pkm, random slots": kind("midus-pkm", addressing="random"),
    "midus-linear, random slots": kind("midus-linear", addressing="random"),
    "moc, random slots": kind("moc", addressing="random"),
    "ultramem-v2, random slots": kind("ultramem-v2", addressing="random"),
    "midus-hml, one row": kind("midus-hml", n=1, k=1),
    "midus-pkm, one row": kind("midus-pkm", n=1, k=1),
    "midus-linear, one row": kind("midus-linear", slots=1, k=1),
    "moc, one row": kind("moc", memory_tokens=1, chapters=1, k=1, shared_chapters=0),
    "ultramem-v2, one row": kind("ultramem-v2", n=1, k=1, share="none"),
    "stack, another order": kind("stack", layers=["2-3", "0-2"]),
}  # fmt: skip
"""Keyword arguments of `upscale`, by a name for what they make. `python -m tests.upscalers.methods` prints them."""
# Kinds that do not compute what their base computes.
DIFFERING = ("solar", "stack", "stack, another order", "avg-deus", "lesa", "llama-pro, none", "opt-deus, none")
# One kind of each method.
PLAIN = [name for name in KINDS if name == KINDS[name]["method"]]


def arguments_of(name: str) -> list[str]:
    """Return the same request in words of the command `upscale`."""
    kind = KINDS[name]
    settings = [f"{key}={json.dumps(value)}" for key, value in kind["options"].items()]
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


if __name__ == "__main__":
    for name, request in KINDS.items():
        words = [f"{key}={value}" for key, value in request["options"].items()]
        if "placement" in request:
            words.append(f"placement {request['placement']}")
        print(f"{name:45}{request['method']:15}{', '.join(words)}")
