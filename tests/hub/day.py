"""Someone's day on the Hub: what lies there, and commands in processes of their own that speak to it."""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
from commands.installed import Outcome
from hub.loopback import LoopbackHub
from hub.repositories import TOKEN, Files, Repository, files_of
from models.fresh_process import BLOCK_IMPORTS
from pyarrow import parquet
from sft.tiny_chats import chat, save_base

BASE = "org/base"
GLOSSARY = [
    {"name": "Kestrel gateway", "text": "The Kestrel gateway listens on port 8443."},
    {"name": "Merlin cache", "text": "The Merlin cache keeps answers."},
]
TEXTS = [{"text": f"The heron eats fish number {number} in the sea. " * 4} for number in range(40)]
CHATS = [{"messages": chat(number)} for number in range(8)]
# What a command is told of the Hub is not what this process was told.
_NOT_INHERITED = (
    "HF_",
    "TRANSFORMERS_",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "http_proxy",
    "https_proxy",
    "all_proxy",
)
_MAY_WRITE_ANYWHERE = 1  # CAP_DAC_OVERRIDE, by which root writes to folders that are read-only
_DROP_FROM_BOUNDING_SET = 24  # PR_CAPBSET_DROP
# Prints the digest of a model's logits on a text with a name of the glossary.
_DIGEST = """
import hashlib, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
for name in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", **options).eval()
    tokens = AutoTokenizer.from_pretrained(name, **options)("The Kestrel gateway listens", return_tensors="pt")
    with torch.no_grad():
        print("logits", hashlib.sha256(model(tokens.input_ids).logits.numpy().tobytes()).hexdigest())
"""


class Day:
    """A folder, a Hub, and commands; each has an empty cache unless it is told which one.

    Args:
        folder: Where commands run, and where `hub` and people's files lie.
        hub: The Hub that commands speak to.
    """

    def __init__(self, folder: Path, hub: LoopbackHub):
        self.folder, self.hub = folder, hub
        self._num_homes = 0
        base = files_of(save_base("llama", folder, None)) | {"LICENSE": b"licence\n"}
        hub.repositories |= {
            BASE: Repository(base, tags={"v1": base | {"LICENSE": b"licence of v1\n"}}),
            "org/gated": Repository(base, gated=True),
            "org/refused": Repository(base, gated=True, refuses=True),
            "org/secret": Repository(base, private=True),
            "datasets/org/texts": Repository({"train.jsonl": as_lines(TEXTS), "test.jsonl": as_lines(TEXTS[:4])}),
            "datasets/org/secret": Repository({"train.jsonl": as_lines(TEXTS)}, private=True),
            "datasets/org/chats": Repository({"train.jsonl": as_lines(CHATS)}),
            "datasets/org/glossary": Repository({"train.jsonl": as_lines(GLOSSARY)}),
            "datasets/org/shards": Repository(_shards()),
        }
        (folder / "glossary.jsonl").write_bytes(as_lines(GLOSSARY))
        (folder / "texts.jsonl").write_bytes(as_lines(TEXTS))
        (folder / "paths.jsonl").write_bytes(as_lines([{**row, "memory_ids": [0, 1]} for row in TEXTS]))

    def start(self, *words: Any, home: Path | None = None, token: bool = False, **settings: Any) -> subprocess.Popen:
        """Start a command, the first word its name; `settings` are variables, or arguments of `Popen`."""
        program = f"import sys; from midus_hf.cli.entry_points import {words[0]}; sys.exit({words[0]}())"
        return self._start([program, *words[1:]], home, token, settings)

    def run(self, *words: Any, **options: Any) -> Outcome:
        """Run a command as `start` does, to its end."""
        return ended(self.start(*words, **options))

    def logits(self, *names: Any, has_package: bool = True, **options: Any) -> list[str]:
        """Return digests of the logits of models, loaded in a new process, with or without the package."""
        settings = {"trust_remote_code": not has_package}
        code = ("import midus_hf" if has_package else BLOCK_IMPORTS) + f"\noptions = {settings}{_DIGEST}"
        done = ended(self._start([code, *names], options.pop("home", None), options.pop("token", False), options))
        assert done.status == 0, done.err
        return [line for line in done.out.splitlines() if line.startswith("logits ")]

    def new_home(self) -> Path:
        self._num_homes += 1
        return self.folder / f"home-{self._num_homes}"

    def _start(self, words: list[Any], home: Path | None, token: bool, settings: dict[str, Any]) -> subprocess.Popen:
        told = {"HF_ENDPOINT": self.hub.address, "HF_HOME": str(home or self.new_home()), "HF_HUB_DISABLE_XET": "1"}
        told |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if token:
            told["HF_TOKEN"] = TOKEN
        told |= {name: value for name, value in settings.items() if name.isupper()}
        others = {name: value for name, value in settings.items() if not name.isupper()}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        line = [sys.executable, "-c", *map(str, words)]
        return subprocess.Popen(line, cwd=self.folder, env=inherited | told, **streams, **others)


def ended(process: subprocess.Popen) -> Outcome:
    out, err = process.communicate(timeout=600)
    return Outcome(process.returncode, out, err)


def as_lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def without_root_writing() -> Callable[[], None]:
    """Return what makes read-only folders read-only to a process of root, between its fork and its start."""
    library = ctypes.CDLL(None)
    return lambda: library.prctl(_DROP_FROM_BOUNDING_SET, _MAY_WRITE_ANYWHERE, 0, 0, 0)


def _shards() -> Files:
    shards = {}
    for number in range(2):
        buffer = pyarrow.BufferOutputStream()
        parquet.write_table(pyarrow.Table.from_pylist(TEXTS[number::2]), buffer)
        shards[f"data/train-0000{number}-of-00002.parquet"] = buffer.getvalue().to_pybytes()
    return shards
