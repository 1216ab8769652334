"""What is advised for a base with pickled weights works as it is printed, and loses nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.upscalers.checkpoints import logits, read_tensors, same_tensors, save_base
from tests.upscalers.test_tokenizer import TEXT, save_tokenizer


def save_pickled(folder: Path, with_tokenizer: bool) -> Path:
    """A tiny bfloat16 checkpoint as they were saved before safetensors."""
    save_base(folder, dtype=torch.bfloat16)
    if with_tokenizer:
        save_tokenizer(folder, None)
    torch.save(read_tensors(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def run_in_shell(line: str, folder: Path) -> None:
    """Type a command into a shell, in a folder, without the network."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["/bin/sh", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "with_tokenizer"),
    [("base", False), ('it\'s a "$HOME" `x` \\ base', True)],
    ids=["plain, without tokenizer", "quoted, with tokenizer"],
)
def test_the_advice_converts_weights_and_tokenizer(name, with_tokenizer, tmp_path, command):
    base = save_pickled(tmp_path / name, with_tokenizer)
    refused = command("--base", base, "--method", "llama-pro", "--output", tmp_path / "out")
    assert refused.status == 2
    advice = re.search(r"Convert it with (python -c .*) and pass --base OUT\.$", refused.err.strip())
    assert advice, refused.err
    run_in_shell(advice[1], tmp_path)

    converted = tmp_path / "OUT"
    assert same_tensors(converted, save_base(tmp_path / "again", dtype=torch.bfloat16))
    made = command("--base", converted, "--method", "llama-pro", "--output", tmp_path / "out")
    assert made.status == 0, made.err
    assert torch.equal(logits(base), logits(tmp_path / "out"))
    if with_tokenizer:
        before, after = (AutoTokenizer.from_pretrained(folder) for folder in (base, tmp_path / "out"))
        assert after(TEXT).input_ids == before(TEXT).input_ids
    assert (tmp_path / "out" / "tokenizer.json").is_file() == with_tokenizer
