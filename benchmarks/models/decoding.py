"""Greedy generation, by `generate` or step by step with a cache of fixed size."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, StaticCache

from benchmarks.timing import synchronize
from midus_hf.memory.kept_values import KeptValues, kept_values
from midus_hf.models.parts import CACHE

# Steps before the first measured step. The first of these compiles.
WARM_UP = 3


def generate(model: PreTrainedModel, prompt: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Generate greedily as users do; return prompts and generated tokens, `[batch, length + new_tokens]`.

    Args:
        model: A model without a token that ends sequences, which would stop generation early.
        prompt: Tokens, `[batch, length]`.
        new_tokens: Tokens to generate per sequence.
    """
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
    )


@dataclass
class StaticDecoding:
    """Generation after a prompt that was read, with a cache of fixed size.

    `step` puts the next token of each sequence into `token`, `[batch, 1]`. `held_bytes` are the bytes of the cache and of
    expanded values, `compile_s` the seconds that compilation took, None if nothing is compiled, and `steps` the steps taken so far.
    """

    step: Callable[[], None]
    token: torch.Tensor
    cache: StaticCache
    held_bytes: int
    compile_s: float | None
    steps: int

    def take(self, steps: int) -> None:
        """Generate `steps` tokens per sequence."""
        for _ in range(steps):
            self.step()
        self.steps += steps


@contextlib.contextmanager
def static_decoding(
    model: PreTrainedModel, prompt: torch.Tensor, most_steps: int, *, compiled: bool, device: str
) -> Iterator[StaticDecoding]:
    """Read a prompt and prepare the next steps, which replay a CUDA graph on a GPU and are plain calls on a CPU.

    As in `generate`, the values that memories derive from their weights are kept while the context lasts.

    Args:
        model: Model on the device.
        prompt: Tokens, `[batch, length]`.
        most_steps: Largest number of steps; the cache has room for no more.
        compiled: Whether the step is compiled first, as one graph.
        device: `"cpu"` or `"cuda"`.

    Raises:
        RuntimeError: If a compiled step would be compiled a second time; or at the end of the context, if the cache
            does not hold one token per step, so that something else was timed.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept_values(model))
        length = prompt.shape[1]
        cache = StaticCache(config=model.config, max_cache_len=length + WARM_UP + most_steps)
        token = model(input_ids=prompt, **{CACHE: cache}, logits_to_keep=1).logits.argmax(-1)

        def step() -> None:
            token.copy_(model(input_ids=token, **{CACHE: cache}, logits_to_keep=1).logits.argmax(-1))

        warm_up, compile_s = WARM_UP, None
        if compiled:
            # Without a reset, this compilation would count against the next model's limit and keep this model's weights.
            stack.callback(torch._dynamo.reset)
            step = torch.compile(step, fullgraph=True, dynamic=False)
            began = time.perf_counter()
            step()
            synchronize(device)
            warm_up, compile_s = warm_up - 1, time.perf_counter() - began
            stack.enter_context(torch.compiler.set_stance("fail_on_recompile"))
        if device == "cuda":
            step = captured(step, warm_up)
        else:
            for _ in range(warm_up):
                step()
        decoding = StaticDecoding(step, token, cache, _held_bytes(model, cache), compile_s, WARM_UP)
        yield decoding
        filled, expected = int(cache.get_seq_length()), length + decoding.steps
        if filled != expected:
            raise RuntimeError(f"the cache holds {filled} tokens; expected {expected}.")


def _held_bytes(model: PreTrainedModel, cache: StaticCache) -> int:
    kept = [getattr(module, "kept", None) for module in model.modules()]
    expanded = sum(values.num_bytes for values in kept if isinstance(values, KeptValues))
    return expanded + sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def captured(step: Callable[[], object], warm_up: int) -> Callable[[], None]:
    """Capture a call in a CUDA graph; return the function that replays the graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
