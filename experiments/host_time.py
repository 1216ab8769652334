"""Host time of a memory block and of a decoder block of the same family, when one token is decoded.

    python -m experiments.host_time
    python -m experiments.host_time --bodies native --family gemma3_text --no-append

Sizes are so small that computing takes almost no time, and launches of Triton's kernels do nothing, so the measured
time is that of Python and of PyTorch's dispatch. Generation on a fast GPU without a captured graph waits for this, and
so in part does generation on a CPU. No key-value cache is read, since reading it would cost both blocks the same.
Values are kept between calls, as `generate` keeps them. In each round both blocks and their parts are timed in turn,
and `ratio` is the median of the rounds' ratios of the memory block's time to the decoder block's.

Columns that end with `_us` are medians in microseconds, of both blocks and of their parts; the rest of a block's time
is its own Python. Launches are PyTorch operations that launch kernels on a GPU, without views and allocations. Triton
kernels and functions in C are not counted.
"""

import contextlib
import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import midus_hf  # noqa: F401 - registers the classes that host memory
from benchmarks.study import Row, listed, run_columns, tell
from experiments.steps import results_of, study
from midus_hf.memory.kept_values import kept_values
from midus_hf.models import FAMILIES
from midus_hf.models.parts import CACHE
from midus_hf.ops import op_choices

BODIES = ("native", "torch", "triton")
HEADS, HEAD_WIDTH, N, K = 4, 16, 16, 4
# Calls per task and round, of which the median counts: other work on the machine slows down single calls.
_CALLS = 5

Tasks = Mapping[str, Callable[[], object]]


class _Counting(TorchDispatchMode):
    """Counter of PyTorch's operations that compute something. This project's own operations are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [output.alias_info for output in function._schema.returns if output.alias_info is not None]
        is_view = any(
            not alias.is_write for alias in aliases
        )  # an alias that is written to is an in-place operation, which computes
        if function.namespace == "aten" and not is_view and "empty" not in function.name():
            self.launches += 1
        return function(*args, **(kwargs or {}))


def model_of(family: str) -> PreTrainedModel:
    """Return a tiny model of a family, with one decoder layer and one memory block."""
    memory = [{"type": "headwise", "layers": [1], "n": N, "k": K}]
    sizes = {
        "hidden_size": HEADS * HEAD_WIDTH,
        "intermediate_size": 2 * HEADS * HEAD_WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "head_dim": HEAD_WIDTH,
        "vocab_size": 128,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(FAMILIES[family].config_class.model_type, **sizes, memory=memory)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.model.layers[1].memory.value_bank.normal_()
    return model


def tasks_of(model: PreTrainedModel) -> Tasks:
    """Return functions that call each block, and each part of a block, with one token."""
    decoder, block = model.model.layers
    norm = getattr(decoder, block.attention_norm or block.attention_output_norm)
    hidden_states = torch.randn(1, 1, HEADS * HEAD_WIDTH)
    position = torch.tensor([[7]])
    layer_type = getattr(decoder, "layer_type", None) or getattr(decoder.self_attn, "layer_type", None)
    rotary = model.model.rotary_emb
    takes_type = "layer_type" in inspect.signature(rotary.forward).parameters
    rotation = rotary(hidden_states, position, layer_type) if takes_type else rotary(hidden_states, position)
    inputs = {
        "attention_mask": None,
        "position_ids": position,
        CACHE: None,
        "position_embeddings": rotation,
    }
    return {
        "decoder": lambda: decoder(hidden_states, **inputs),
        "memory": lambda: block(hidden_states, **inputs),
        "norm": lambda: norm(hidden_states),
        "attention": lambda: decoder.self_attn(hidden_states=hidden_states, **inputs),
        "mlp": lambda: decoder.mlp(hidden_states),
        "add": lambda: hidden_states + hidden_states,
        "memory_attention": lambda: block.self_attn(hidden_states=hidden_states, **inputs),
        "memory_op": lambda: block.memory(hidden_states, hidden_states),
    }


@contextlib.contextmanager
def body_of(name: str) -> Iterator[None]:
    """Make ops use one body. Triton's body launches nothing."""
    with idle_launches() if name == "triton" else op_choices(backend=name):
        yield


def microseconds(tasks: Tasks, rounds: int) -> dict[str, list[float]]:
    """Return the time of one call of each task, in microseconds, for each round."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, task in tasks.items():
            task()  # the first call after another task finds less in the processor's caches
            laps = []
            for _ in range(_CALLS):
                began = time.perf_counter()
                task()
                laps.append(time.perf_counter() - began)
            times[name].append(statistics.median(laps) * 1e6)
    return times


def measured(family: str, body: str, rounds: int) -> Row:
    """Time one body in one family."""
    torch.manual_seed(0)
    model = model_of(family)
    with torch.no_grad(), kept_values(model), body_of(body):
        tasks = tasks_of(model)
        microseconds(tasks, 3)
        times = microseconds(tasks, rounds)
        launches = {}
        for name in ("decoder", "memory"):
            with _Counting() as counting:
                tasks[name]()
            launches[name] = counting.launches
    pairs = zip(times["memory"], times["decoder"], strict=True)
    return {
        "family": family,
        "body": body,
        "rounds": rounds,
        "ratio": round(statistics.median(memory / decoder for memory, decoder in pairs), 3),
        **{f"{name}_us": round(statistics.median(taken), 1) for name, taken in times.items()},
        "decoder_launches": launches["decoder"],
        "memory_launches": launches["memory"],
    }


def main() -> None:
    parser = study(__doc__, work=None)
    parser.add_argument("--family", default="llama", choices=sorted(FAMILIES))
    listed(parser, "--bodies", BODIES)
    parser.add_argument("--rounds", type=int, default=200, help="(default: 200)")
    arguments = parser.parse_args()
    bodies = arguments.bodies.split(",")
    for body in bodies:
        if body not in BODIES:
            parser.error(f"body is {body!r}; expected one of {', '.join(BODIES)}, joined by commas.")
    if arguments.rounds < 1:
        parser.error(f"rounds is {arguments.rounds}; expected 1 or more.")
    torch.set_num_threads(1)
    columns = {"body": "{body}", "memory block, us": "{memory_us:.0f}", "decoder block, us": "{decoder_us:.0f}"}
    columns |= {
        "ratio": "{ratio:.2f}",
        "norm": "{norm_us:.0f}",
        "attention": "{attention_us:.0f}",
        "mlp": "{mlp_us:.0f}",
    }
    columns |= {"add": "{add_us:.1f}", "attention of memory block": "{memory_attention_us:.0f}"}
    columns |= {"memory": "{memory_op_us:.0f}", "launches of decoder block": "{decoder_launches}"}
    columns |= {"of memory block": "{memory_launches}"}
    rows = (measured(arguments.family, body, arguments.rounds) for body in bodies)
    tell(rows, columns, results_of("host_time", arguments), run_columns())


class _Utils:
    def load_binary(self, name: str, *arguments: Any) -> tuple[int, int, int, int, int]:
        """Return the module, function, registers, spilled registers and most threads of a kernel."""
        return 1, 1, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return the properties of an H100 that triton asks for."""
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}


class _Launcher:
    """Stand-in for triton's C function that launches a kernel."""

    def __init__(self, source: object, metadata: object):
        pass

    def __call__(self, *arguments: Any) -> None:
        pass


class _IdleDriver:
    """Stand-in for everything that triton asks of a GPU when it compiles and launches a kernel."""

    utils = _Utils()
    launcher_cls = _Launcher

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


@contextlib.contextmanager
def idle_launches() -> Iterator[None]:
    """Let ops use their kernels for CPU tensors: compiled for an H100 and prepared as usual, but never run.

    Outputs are therefore not filled, and the time that PyTorch itself would spend on launches is never included.
    """
    from triton.runtime import driver

    from midus_hf.ops.dispatch import choices

    if choices.interprets_kernels():
        raise SystemExit("TRITON_INTERPRET is 1, so kernels are interpreted; unset it, or choose other bodies.")
    with (
        patch.object(driver, "_active", _IdleDriver()),
        patch.object(choices, "interprets_kernels", lambda: True),
        op_choices(backend="triton"),
    ):
        yield


if __name__ == "__main__":
    main()
