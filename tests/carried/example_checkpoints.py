"""Small checkpoints of every method that adds memory, made once for all tests of this folder."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from pairs import in_turn
from tiny import NATIVE_FAMILIES, save_tiny_model, save_tiny_tokenizer
from transformers import CONFIG_MAPPING

from scripts.anatomy.tiny import tiny_model
from upscalers.runs.upscale import upscale

TREE = {"sizes": [3, 0, 2], "branching": 3}
# Methods with their options.
METHODS: dict[str, dict[str, Any]] = {
    "engram": {"rows": 199, "width": 16, "hash_heads": 4},
    **dict.fromkeys(("hier-ffn", "hier-kv", "hier-lora-ffn", "hier-lora-qk", "hier-lora-vo"), TREE),
    "midus-hml": {"n": 8, "k": 2},
    "midus-linear": {"slots": 12, "k": 2},
    "midus-pkm": {"n": 8, "k": 2},
    "moc": {"memory_tokens": 24, "chapters": 12, "k": 2, "chunk_size": 3},
    "moda": {},
    "packs": {},
    "ultramem-v2": {"n": 8, "k": 4},
}
# Of random tokens, every third is the name of an entry of packs.
ENTRIES = [{"name": f"word{token}", "text": f"word{token} word{token + 1} word1"} for token in range(3, 126, 3)]

# Kinds of these methods whose memories need other parts of a model, by a name: the method, and further options.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "engram-behind-layers": ("engram", {"site": "behind-layer"}),
    "moc-own": ("moc", {"share": "none", "site": "behind-layer"}),
    "moc-per-sequence": ("moc", {"routing": "sequence"}),
    "moc-per-token": ("moc", {"routing": "token"}),
    "ultramem-v2-ring": ("ultramem-v2", {"share": "ring:4"}),
    "ultramem-v2-skip": ("ultramem-v2", {"site": "skip", "span": 2}),
}

# The number of lines that the code of a checkpoint may have, by method.
MOST_LINES = dict.fromkeys(METHODS, 2700) | {"midus-hml": 1900, "moc": 2900, "packs": 4400}

ALL_CASES = [(family, method) for family in NATIVE_FAMILIES for method in METHODS]
# Families with methods: by default every method with one family, the families in turn.
CASES = [(family, method) for method, family in in_turn(METHODS, NATIVE_FAMILIES)]
# Types that no table describes, with methods: linear attention, experts, latent attention, stacked projections, heads of two sizes.
INFERRED = [("qwen3_5_text", "moc"), ("gpt_oss", "midus-hml"), ("deepseek_v3", "hier-lora-ffn"), ("phi3", "midus-hml")]
INFERRED += [("phi3", "hier-lora-qk"), ("gemma4_text", "midus-hml")]
INFERRED = [case for case in INFERRED if case[0] in CONFIG_MAPPING]


def checkpoint(root: Path, family: str, method: str) -> Path:
    """Return the folder of a checkpoint of a method, or of a kind of one, made when it is first asked for."""
    # Transformers calls the package of remote code after the last folder.
    output = root / family / f"{family}_{method}"
    if not output.exists():
        base = root / family / ("spoken" if method == "packs" else "base")
        if not base.exists() and family in NATIVE_FAMILIES:
            save_tiny_model(family, base)
        elif not base.exists():
            sizes = ["vocab_size", *(["vocab_size_per_layer_input"] if family == "gemma4_text" else [])]
            tiny_model(family, **dict.fromkeys(sizes, 128)).save_pretrained(base)
        method, changes = KINDS.get(method, (method, {}))
        if method == "packs":
            save_tiny_tokenizer(base)
            changes = {"corpus": str(root / "glossary.jsonl")}
            Path(changes["corpus"]).write_text("\n".join(map(json.dumps, ENTRIES)))
        upscale(base=base, method=method, output=output, options={**METHODS[method], **changes}, verify=False)
    return output


def imported(folder: Path, copy: str = "") -> Any:
    """Return the module of a checkpoint under a name of its own; another copy of it has other classes."""
    name = f"carried_{folder.name.replace('-', '_')}_{copy}"
    if name not in sys.modules:
        spec: Any = importlib.util.spec_from_file_location(name, folder / "modeling_midus.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
