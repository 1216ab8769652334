"""Bases and chats that the tests of fine-tuning share."""

from functools import cache
from pathlib import Path

import pytest
from sft.tiny_chats import chat, save_base, sft_config, write_rows

from midus_hf.training.sft.run import SftArguments


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    made = cache(lambda family, method: save_base(family, tmp_path_factory.mktemp("sft"), method))
    methods = {True: "midus-hml", False: None}
    return lambda family="llama", memory=False: made(family, methods.get(memory, memory))


@pytest.fixture(scope="session")
def chats(tmp_path_factory) -> Path:
    rows = [{"messages": chat(number)} for number in range(16)]
    return write_rows(tmp_path_factory.mktemp("chats") / "chats.jsonl", rows)


@pytest.fixture
def config_for(base, chats, tmp_path):
    def config(output: str = "out", model: Path | None = None, data: Path = chats, **changes) -> SftArguments:
        return sft_config(model or base("llama", True), data, tmp_path / output, **changes)

    return config
