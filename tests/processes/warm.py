"""Run Python in processes of their own which need not import torch and transformers: a fresh interpreter takes 5 s for that.

They are forked from an interpreter that has imported these, and nothing of this project, once per process of tests. What tests
imports, or depends on variables that libraries read when they are imported, starts a fresh interpreter instead.
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

# What `accelerate launch -m midus_hf COMMAND ...` runs in each process.
MIDUS = "import runpy; runpy.run_module('midus_hf', run_name='__main__')"
_SERVER = Path(__file__).with_name("server.py")
# Asked through the driver itself, a GPU is lost to all forks.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def run_warm(
    code: str, *arguments: Any, folder: Path | None = None, timeout: float = 300, **environment: str
) -> subprocess.CompletedProcess:
    """Run `code` as `python -c` does, offline, on one thread and with these variables; after `timeout` seconds the test fails."""
    (done,) = _run([_process(code, "-c", "", arguments, folder, environment)], timeout)
    return done


def run_ranks(
    program: str | Path, *arguments: Any, processes: int = 2, timeout: float = 300, **environment: str
) -> subprocess.CompletedProcess:
    """Run code or a file in processes that know of each other: the first exit status that is not 0, and what all printed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    ranks = [
        {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", **environment}
        for rank in range(processes)
    ]
    what = (program, "-c", "")
    if isinstance(program, Path):
        what = (program.read_text(encoding="utf-8"), str(program), str(program.parent))
    done = _run([_process(*what, arguments, None, rank) for rank in ranks], timeout)
    return subprocess.CompletedProcess(
        [what[1], *map(str, arguments)],
        next((each.returncode for each in done if each.returncode), 0),
        "".join(each.stdout for each in done),
        "".join(each.stderr for each in done),
    )


def _process(
    code: str, name: str, path: str, arguments: tuple, folder: Path | None, environment: dict[str, str]
) -> dict[str, Any]:
    return {
        "code": code,
        "name": name,
        "path": path,
        "arguments": [str(argument) for argument in arguments],
        "folder": str(folder or Path.cwd()),
        "environment": {**os.environ, **_ENVIRONMENT, **environment},
    }


@cache
def _server() -> subprocess.Popen:
    server = subprocess.Popen(
        [sys.executable, _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **_ENVIRONMENT},
    )
    atexit.register(server.kill)
    return server


def _run(processes: list[dict[str, Any]], timeout: float) -> list[subprocess.CompletedProcess]:
    server = _server()
    with tempfile.TemporaryDirectory() as folder:
        for number, process in enumerate(processes):
            for stream in ("stdout", "stderr"):
                process[stream] = f"{folder}/{number}.{stream}"
                Path(process[stream]).touch()
        print(json.dumps({"processes": processes}), file=server.stdin, flush=True)
        identifiers = json.loads(server.stdout.readline())
        in_time = bool(select.select([server.stdout], [], [], timeout)[0])
        if not in_time:
            for identifier in identifiers:
                os.kill(identifier, signal.SIGKILL)
        statuses = json.loads(server.stdout.readline())
        printed = [[Path(process[stream]).read_text() for stream in ("stdout", "stderr")] for process in processes]
    assert in_time, f"still running after {timeout} s: {printed}"
    return [
        subprocess.CompletedProcess([process["name"], *process["arguments"]], status, *streams)
        for process, status, streams in zip(processes, statuses, printed, strict=True)
    ]
