"""Forks programs from an interpreter that has imported torch and transformers; `warm.py` starts it and asks it.

A request is a line of JSON on standard input. Its answers are two lines on standard output: the ids of the processes, and, when
all have ended, their exit statuses. A forked process leaves the loop and ends as any interpreter does, with what is registered
for its exit.
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import random
import signal
import sys
import types
from typing import Any

# What programs of tests import, as far as it is installed.
LIBRARIES = (
    "datasets",
    "pydantic.type_adapter",
    "rich.progress",
    "scipy.io",
    "torch._dynamo",
    "torch.distributed.tensor",
    "transformers.generation",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.gemma2.modeling_gemma2",
    "transformers.models.gemma3.modeling_gemma3",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.tokenization_utils_tokenizers",
    "transformers.trainer",
    "typer.main",
)


def import_libraries() -> None:
    """Import them, and let transformers compile all patterns that it knows names of tensors by, as it does for the first model."""
    for library in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
    with contextlib.suppress(ImportError, AttributeError):
        importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")


def await_request() -> dict[str, Any] | None:
    """Serve until this process is a fork that has a program to run, and return that; None at the end of requests."""
    for line in sys.stdin:
        request, processes = json.loads(line), []
        for process in request["processes"]:
            identifier = os.fork()
            if identifier == 0:
                return process
            processes.append(identifier)
        print(json.dumps(processes), flush=True)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in processes]), flush=True)
    return None


def run(process: dict[str, Any]) -> None:
    """Run a program with the arguments, environment, working folder and streams that a fresh interpreter would be given."""
    streams = [os.open(os.devnull, os.O_RDONLY)]
    streams += [os.open(process[name], os.O_WRONLY | os.O_APPEND) for name in ("stdout", "stderr")]
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    faulthandler.enable(2)  # one that PyTorch's own threads end leaves more than its status
    os.environ.clear()
    os.environ.update(process["environment"])
    os.chdir(process["folder"])
    # Shells start what runs in the background with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("numpy").random.seed()
    sys.argv = [process["name"], *process["arguments"]]
    sys.path[:1] = [process["path"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    program = types.ModuleType("__main__")
    program.__file__ = process["name"]
    sys.modules["__main__"] = program
    exec(compile(process["code"], process["name"], "exec"), program.__dict__)


if __name__ == "__main__":
    import_libraries()
    gc.collect()
    gc.freeze()
    request = await_request()
    if request is not None:
        run(request)
