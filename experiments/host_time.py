"""What the host spends on a memory block and on a decoder block of the family when one token is decoded.

    python -m experiments.host_time
    python -m experiments.host_time --bodies native --family gemma3_text --no-append

Sizes are so small that computing takes next to no time, and launches of Triton's kernels do nothing, so what is timed is Python and
PyTorch's dispatch. That is what generation waits for on a fast GPU without a captured graph, and in part on a CPU. Nothing is read
from a cache, which would cost both blocks the same. Values are kept, as `generate` keeps them. Blocks and their parts are timed in
turn, round after round; the ratio is the median of the rounds' own ratios.

Of a row, columns that end with `_us` are medians in microseconds, of both blocks and of their parts; what a block's own Python takes
is the rest. `ratio` is that of the memory block's time to the decoder block's. Launches are operations of PyTorch that launch kernels
on a GPU, neither views nor allocations; a kernel of Triton, or a function in C, is not counted.
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
from midus_hf.ops import op_choices

BODIES = ("native", "torch", "triton")
HEADS, HEAD_WIDTH, N, K = 4, 16, 16, 4
_CALLS = 5
"""Of one task in one round, of which the median counts: other work on the machine takes whole calls."""

Tasks = Mapping[str, Callable[[], object]]


class _Counting(TorchDispatchMode):
    """Counts operations that compute something, those of this project aside."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [given.alias_info for given in function._schema.returns if given.alias_info is not None]
        is_view = any(not alias.is_write for alias in aliases)  # what is written in place is computed
        if function.namespace == "aten" and not is_view and "empty" not in function.name():
            self.launches += 1
        return function(*args, **(kwargs or {}))


def model_of(family: str) -> PreTrainedModel:
    """A tiny model of a family: a decoder layer, and a memory block."""
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
    """Both blocks and their parts, each called with one token."""
    decoder, block = model.model.layers
    norm = getattr(decoder, block.attention_norm or block.mlp_norm or block.attention_output_norm)
    hidden_states = torch.randn(1, 1, HEADS * HEAD_WIDTH)
    position = torch.tensor([[7]])
    layer_type = getattr(decoder, "layer_type", None) or getattr(decoder.self_attn, "layer_type", None)
    rotary = model.model.rotary_emb
    takes_type = "layer_type" in inspect.signature(rotary.forward).parameters
    rotation = rotary(hidden_states, position, layer_type) if takes_type else rotary(hidden_states, position)
    told = {"attention_mask": None, "position_ids": position, "past_key_values": None, "position_embeddings": rotation}
    return {
        "decoder": lambda: decoder(hidden_states, **told),
        "memory": lambda: block(hidden_states, **told),
        "norm": lambda: norm(hidden_states),
        "attention": lambda: decoder.self_attn(hidden_states=hidden_states, **told),
        "mlp": lambda: decoder.mlp(hidden_states),
        "add": lambda: hidden_states + hidden_states,
        "memory_attention": lambda: block.self_attn(hidden_states=hidden_states, **told),
        "memory_op": lambda: block.memory(hidden_states, hidden_states),
    }


@contextlib.contextmanager
def body_of(name: str) -> Iterator[None]:
    """Let ops have one body; that in Triton launches nothing."""
    with idle_launches() if name == "triton" else op_choices(backend=name):
        yield


def microseconds(tasks: Tasks, rounds: int) -> dict[str, list[float]]:
    """What one call of each task takes, in each round."""
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
        """Module, function, registers, spilled registers, threads at most."""
        return 1, 1, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Of an H100, as far as triton asks."""
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}


class _Launcher:
    """Stands where triton has a function in C that launches a kernel."""

    def __init__(self, source: object, metadata: object):
        pass

    def __call__(self, *arguments: Any) -> None:
        pass


class _IdleDriver:
    """All that triton asks of a GPU when it compiles and launches a kernel."""

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
    """Let ops take their kernels for CPU tensors, compiled for an H100 and prepared as ever, but never run: outputs are not filled.

    What PyTorch itself would spend on launching is not in it either, on any side.

    Raises:
        SystemExit: If triton interprets kernels, which then are not compiled.
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
