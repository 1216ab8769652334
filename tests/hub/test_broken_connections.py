"""A connection that breaks is one sentence, whichever library it breaks in; a silent Hub is noted."""

import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import aiohttp
import pytest
import requests
import urllib3
from commands.installed import run_in_process
from fsspec.exceptions import FSTimeoutError
from huggingface_hub import HfApi
from huggingface_hub.errors import OfflineModeIsEnabled
from sft.tiny_chats import save_base

from midus_hf.config.errors import RequestError, as_request_error
from midus_hf.sources import downloads
from midus_hf.sources.downloads import DownloadError, as_download_error, fetching
from tests.upscalers.conftest import hub  # noqa: F401 - a fixture
from tests.upscalers.hub_server import Fault, Repository, files_of, http

FILE = "https://hub.test/org/base/resolve/0a1b/a%20folder/model.safetensors"
REMEDY = "Files that have come whole are kept: run the command again to fetch the rest."
ERRORS = [
    http.RemoteProtocolError("cut"),
    http.ConnectError("cut"),
    http.ReadTimeout("cut"),
    requests.exceptions.ConnectionError("cut"),
    requests.exceptions.ReadTimeout("cut"),
    requests.exceptions.ChunkedEncodingError("cut"),
    urllib3.exceptions.ProtocolError("cut"),
    urllib3.exceptions.ReadTimeoutError(None, "/", "cut"),
    aiohttp.ServerDisconnectedError("cut"),
    aiohttp.ClientPayloadError("cut"),
    FSTimeoutError("cut"),
]
WORDS = {
    "upscale": ("--base", "org/base", "--method", "llama-pro", "--output", "out"),
    "midus ask": ("org/base", "What?", "--max-new-tokens", "1"),
    "midus train": (
        "corpus.txt",
        "--model",
        "org/base",
        "--output",
        "out",
        "--trainable",
        "all",
        "--sequence_length",
        "32",
    ),
}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__module__}.{type(error).__name__}")
def test_error_of_a_connection_is_a_sentence(error):
    with pytest.raises(DownloadError) as told, fetching("org/base"):
        raise OSError("no file") from error
    assert str(told.value).startswith(
        f"the connection broke while org/base was being fetched ({type(error).__name__}: "
    )
    assert str(told.value).endswith(f"cut). {REMEDY}")


def test_first_name_and_refusals_stay():
    with (
        pytest.raises(DownloadError, match="while inner was being fetched"),
        as_request_error("model is 'x'", OSError, RuntimeError, ValueError),
        fetching("outer"),
        fetching("inner"),
    ):
        raise ERRORS[0]
    refusal = RequestError("'x' is no local folder, and the Hub cannot be reached")
    refusal.__context__, refusal.__suppress_context__ = ERRORS[0], True
    for error in (refusal, OfflineModeIsEnabled("offline"), FileNotFoundError("x"), ConnectionResetError("a worker")):
        assert as_download_error(error) is None


@pytest.mark.parametrize(("address", "named"), [
    (FILE, "a folder/model.safetensors of org/base"),
    ("https://storage.test/0a1b?Signature=signed", "something from storage.test"),
    (None, "something from the network"),
])  # fmt: skip
def test_request_names_what_was_fetched(address, named):
    request = None if address is None else http.Request("GET", address)
    told = as_download_error(http.ReadError("cut", request=request))
    assert str(told).startswith(f"the connection broke while {named} was being fetched (ReadError: cut)")


@pytest.mark.parametrize("command", WORDS)
def test_command_ends_with_the_sentence(command, hub, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the client's own attempts
    hub.repositories["org/base"] = Repository(files_of(save_base("llama", tmp_path, None)))
    (tmp_path / "corpus.txt").write_text("The heron eats fish. " * 400)
    hub.faults = [Fault("/large/", cut_after=0)]
    assert run_in_process(command, [*WORDS[command]], monkeypatch) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"{command}: the connection broke while org/base was being fetched (RemoteProtocolError: ")
    assert last.endswith(REMEDY)
    assert not (tmp_path / "out").exists()


def test_silent_hub_is_noted(hub, monkeypatch):  # noqa: F811
    hub.faults = [Fault("/api/whoami-v2", silent=True)]
    noted = Mock(side_effect=lambda line: hub.breaks_silence.set())
    monkeypatch.setattr(downloads, "print_note", noted)
    monkeypatch.setattr(downloads, "_SECONDS_OF_SILENCE", 0.01)
    threads = threading.active_count()
    with fetching("org/base"):
        HfApi().whoami()
    noted.assert_called_once_with("org/base: the Hub has not answered for 0 s. Still waiting")
    assert threading.active_count() == threads


def test_answering_hub_is_not_noted(hub, monkeypatch):  # noqa: F811
    hub.repositories["org/base"] = Repository({"config.json": b"{}"})
    noted = Mock()
    monkeypatch.setattr(downloads, "print_note", noted)
    monkeypatch.setattr(downloads, "_SECONDS_OF_SILENCE", 0.1)
    clock = SimpleNamespace(now=0.0)
    has_looked = threading.Event()

    def monotonic():
        if clock.now:
            has_looked.set()
        return clock.now

    monkeypatch.setattr(downloads, "time", SimpleNamespace(monotonic=monotonic))
    with fetching("org/base"), fetching("a part of it"):
        HfApi().model_info("org/base")
        clock.now = 1000.0
        assert has_looked.wait(60), "an answered request is no longer waited for"
    noted.assert_not_called()
