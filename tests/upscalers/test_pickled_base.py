"""What is advised for a base with pickled weights works as it is printed, and loses nothing."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from processes.warm import run_warm
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
    """Type a command that calls `python -c` into a shell, in a folder, without the network."""
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        '#!/bin/sh\nprintf "%s" "$1" >"$TOLD/option"\nprintf "%s" "$2" >"$TOLD/code"\nexit $(($# != 2))\n'
    )
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "TOLD": str(folder)}
    subprocess.run(["/bin/sh", "-c", line], cwd=folder, env=environment, check=True, timeout=300)
    assert (folder / "option").read_text() == "-c"
    done = run_warm((folder / "code").read_text(), folder=folder)
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
