"""Settings and fixtures of the upscaler tests."""

import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from commands.installed import Outcome
from huggingface_hub import HfApi, constants, set_client_factory
from huggingface_hub.utils._http import default_client_factory
from tiny import NATIVE_FAMILIES

from midus_hf.cli import upscale as cli
from scripts.anatomy.tiny import tiny_model
from tests.upscalers.checkpoints import save_base
from tests.upscalers.hub_server import TOKEN, Hub

# llama.cpp's Python package is no dependency: `make test-gguf` has it.
collect_ignore = [] if importlib.util.find_spec("llama_cpp") else ["test_llama_cpp.py"]


@pytest.fixture(scope="session")
def shared_base(tmp_path_factory) -> Callable[..., Path]:
    """A tiny base of a family or type of transformers, saved once; read-only."""

    @cache
    def base(family: str = "llama", **sizes: Any) -> Path:
        folder = tmp_path_factory.mktemp(f"base-{family}") / family
        if family in NATIVE_FAMILIES:
            return save_base(folder, family, **sizes)
        tiny_model(family, **sizes).save_pretrained(folder)
        return folder

    return base


@pytest.fixture
def base(shared_base) -> Path:
    return shared_base("llama")


@pytest.fixture
def in_process(monkeypatch, capsys) -> Callable[..., Outcome]:
    """Run a console command in this process: its `main` and its words."""

    def run(main: Callable[[list[str]], int], *words: Any) -> Outcome:
        capsys.readouterr()
        status = main([*map(str, words)])
        return Outcome(status, *capsys.readouterr())

    return run


@pytest.fixture
def command(in_process) -> Callable[..., Outcome]:
    return partial(in_process, cli.main)


@pytest.fixture
def refused(tmp_path) -> Callable[..., None]:
    """Check that a command failed with these words (or regex) and left only these names."""

    def check(outcome: Outcome, message: str, left: Sequence[str] | None = ()) -> None:
        assert (outcome.status, outcome.out) == (2, ""), outcome.err
        assert outcome.err.startswith("upscale")
        assert outcome.err.count("\n") == 1
        assert message in outcome.err or re.search(message, outcome.err), outcome.err
        if left is None:
            assert not (tmp_path / "out").exists()
        else:
            assert sorted(path.name for path in tmp_path.iterdir()) == sorted(left)

    return check


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Iterator[Hub]:
    """An empty hub, which huggingface_hub's client in this process talks to."""
    made = Hub()
    set_client_factory(made.client)
    monkeypatch.setattr(constants, "ENDPOINT", made.address)
    # Clients that were made before, by huggingface_hub and transformers, and keep what they were made with.
    here = property(lambda client: made.address, lambda client, value: vars(client).update(endpoint=value))
    monkeypatch.setattr(HfApi, "endpoint", here, raising=False)
    template = made.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    yield made
    set_client_factory(default_client_factory)
