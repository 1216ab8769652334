"""Servers of models, each in a process of its own, and what they are asked by OpenAI's protocol."""

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MOST_SECONDS = 300


@contextmanager
def answering(command: list[str], log: Path, **settings: Any) -> Iterator[str]:
    """Run a server on a free port, which is added to its command line, and give its address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command, address = [*command, "--host", "127.0.0.1", "--port", port], f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, **settings)
    try:
        for _ in range(5 * MOST_SECONDS):
            assert server.poll() is None, log.read_text()[-4000:]
            with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
                break
            time.sleep(0.2)
        yield address
    finally:
        server.terminate()
        server.wait(60)


def choice_of(address: str, endpoint: str, **request: Any) -> dict[str, Any]:
    """Ask a server for greedy tokens, and return its one choice."""
    body = json.dumps({"temperature": 0, **request}).encode()
    asked = urllib.request.Request(f"{address}/v1/{endpoint}", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=MOST_SECONDS) as reply:
        (choice,) = json.load(reply)["choices"]
    return choice
