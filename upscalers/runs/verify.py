"""Comparison of two whole models: the upscaled model computes what the base computes, layer by layer."""

import contextlib
import math
import os
import resource
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from midus_hf.config.backbone import PROVEN
from midus_hf.memories.entries import TABLES
from upscalers.architecture.family import Config
from upscalers.checkpoint.base_model import BaseModel
from upscalers.checkpoint.computed_tensor import read_tensor
from upscalers.checkpoint.quantised_weights import QUANTISED, product_of_transformers
from upscalers.checkpoint.safetensors_format import ITEM_BYTES, TORCH_NAMES, StoredTensor
from upscalers.plan.plan import Base, Plan
from upscalers.record.report import Identity
from upscalers.request.errors import RequestError, VerificationError, one_line
from upscalers.request.progress import Progress
from upscalers.runs.streamed_model import LoadedModel, RunningModel, StreamedModel, raised_in_memory
from upscalers.tensors.recipes import Copy
from upscalers.tensors.writer import OutputTensor

_BATCH, _TOKENS = 2, 64
_ROWS_AT_ONCE = 16
# `comparison_bytes` allows for a module's weights twice, since matrix products rearrange them; for four times the logits,
# since both models' logits are held, computed and compared; for the intermediates of a layer, as a number of float32 hidden
# states; and for checking config and tokenizer and for stacks and heaps of threads, up to 0.2 GB of address space.
_COPIES_OF_WEIGHTS, _COPIES_OF_LOGITS, _WIDTHS_OF_A_LAYER = 2, 4, 64
_REST_OF_RUN_BYTES = 200_000_000


def comparison_bytes(
    base: Mapping[str, StoredTensor], new: Mapping[str, StoredTensor], config: Config, dtype: str
) -> int:
    """Return the greatest memory, in bytes, that a run with `compare_models` at its end takes.

    Memory that the process holds before the run writes is not included.

    Args:
        base: The base's tensors, by full name.
        new: The upscaled model's tensors, by full name; they may be unwritten yet.
        config: Raw config of the base.
        dtype: Dtype to run in, as safetensors names it.
    """
    modules: Counter[str] = Counter()
    tables = 0
    for model, tensors in enumerate((base, new)):
        for name, tensor in tensors.items():
            cast = 0 if tensor.dtype == dtype else math.prod(tensor.shape) * ITEM_BYTES[dtype]
            modules[f"{model} {name.rpartition('.')[0]}"] += tensor.num_bytes + cast
            if name.removeprefix("model.").startswith(f"{TABLES}."):  # in memory for the whole pass
                tables += tensor.num_bytes + cast
    tokens, hidden = _BATCH * _TOKENS, config["hidden_size"]
    logits = tokens * config["vocab_size"] * ITEM_BYTES[dtype]
    hidden_states = 2 * (config["num_hidden_layers"] + 1) * tokens * hidden * ITEM_BYTES[dtype]
    layer = _WIDTHS_OF_A_LAYER * tokens * hidden * ITEM_BYTES["F32"]
    weights = max(modules.values(), default=0)
    return (
        _COPIES_OF_WEIGHTS * weights + _COPIES_OF_LOGITS * logits + hidden_states + layer + tables + _REST_OF_RUN_BYTES
    )


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process can still take.

    This is the machine's available memory, or less where the container's limit or the limit on the process's address
    space leaves less.

    Args:
        root: Folder that holds the kernel's `proc` and `sys`. Default: `/`.
    """
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError, KeyError):  # "max" where the container has no limit
        group = root / "sys/fs/cgroup"
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        file_bytes = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
        available = min(available, max(0, limit - used + int(file_bytes)))  # the kernel frees these pages on demand
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        with contextlib.suppress(OSError):
            taken = int((root / "proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            available = min(available, max(0, limit - taken))
    return available


def compare_models(
    base: BaseModel,
    folder: Path,
    tensors: Mapping[str, StoredTensor],
    plan: Plan,
    dtype: str,
    identity: bool,
    progress: Progress,
) -> tuple[Identity, float | None]:
    """Run both models on a fixed batch, with the weights of one module in memory at a time, and compare their logits.

    Args:
        base: The base checkpoint.
        folder: Folder of the upscaled model.
        tensors: Tensors of the upscaled model, by full name.
        plan: The layer plan.
        dtype: Dtype to run in, as safetensors names it.
        identity: Whether the method promises equality; if so, hidden states are compared behind every layer as well.
        progress: Display that shows every layer.

    Returns:
        What was compared with what, with the largest absolute difference between logits that are finite; and the KL divergence
        from the base's next-token distribution to the result's, mean over tokens with finite logits, in nats; None if no token
        has them. If no logit of the base is finite, nothing was compared.

    Raises:
        RequestError: If transformers cannot run the base.
        VerificationError: If a tensor was not loaded as saved, transformers cannot run the result, or identity is
            promised and a hidden state or a logit differs. The message names the first layer that differs. Also if a logit is not
            finite where the base's is, or a layer of an unproven type computes otherwise where it stands in the result
            than in the base.
    """
    torch_dtype = getattr(torch, TORCH_NAMES[dtype])
    generator = torch.Generator().manual_seed(0)
    hidden_states: list[torch.Tensor] = []
    partings: list[tuple[int, float]] = []
    counterparts = _counterparts(plan)

    new_streams: list[torch.Tensor] = []
    replays = [] if identity or base.family.model_type in PROVEN else _replays(plan)

    def remember(number: int, hidden: torch.Tensor) -> None:
        if identity:
            hidden_states.append(hidden)
        if number:
            progress.advance()

    def follow(number: int, hidden: torch.Tensor) -> None:
        # Each attention spreads NaN and infinite values to later tokens, and a new layer spreads them before the base's next
        # layer does. If the base has any, only predictions can be compared.
        if identity and base_is_finite and not partings:
            expected = hidden_states[counterparts[number]]
            if not _are_same(expected, hidden):
                partings.append((number, _largest_difference(expected, hidden)))
        if replays:
            new_streams.append(hidden)
        if number:
            progress.advance()

    steps = base.num_layers * (1 + len(replays)) + plan.num_layers + 2
    progress.stage("comparing with the base", steps, "layers and heads")
    try:
        model = _running(base, base.folder, base.tensors, torch_dtype)
        tokens = torch.randint(0, model.vocab_size, (_BATCH, _TOKENS), generator=generator)
        base_logits = model.logits(tokens, remember).flatten(0, 1)
        del model  # its weights may all be in memory
    except Exception as error:
        in_memory = raised_in_memory(error)
        if in_memory is not None:
            raise RequestError(f"{in_memory}, in the base. Mend the memory, or pass --no-verify.") from None
        raise RequestError(
            f"transformers cannot run the base ({type(error).__name__}: {one_line(error)}). Repair it or download it again; where "
            "it only does not fit in memory, pass --no-verify."
        ) from None
    progress.advance()
    base_is_finite = all(bool(values.isfinite().all()) for values in (*hidden_states, base_logits))
    try:
        model = _running(base, folder, tensors, torch_dtype)
        new_logits = model.logits(tokens, follow).flatten(0, 1)
    except VerificationError:
        raise
    except Exception as error:
        in_memory = raised_in_memory(error)
        if in_memory is not None:
            raise VerificationError(f"{in_memory}. Mend the memory.") from None
        if not isinstance(error, RuntimeError | MemoryError):
            raise
        raise VerificationError(
            f"transformers cannot run the upscaled model ({type(error).__name__}: {one_line(error)}). Where it only does not fit in "
            "memory, pass --no-verify."
        ) from None
    equal = _are_same(base_logits, new_logits)
    if identity and (partings or not equal):
        compared = "hidden states" if equal else "logits"
        difference = partings[0][1] if equal else _largest_difference(base_logits, new_logits)
        position = _place(partings[0][0] if partings else None, plan)
        raise VerificationError(
            f"the upscaled model's {compared} differ from the base's by up to {difference:g}; expected a difference of exactly 0. "
            f"They part {position}."
        )
    broken = ~base_logits.isfinite()
    if (~new_logits.isfinite() & ~broken).any():
        raise VerificationError(
            "the upscaled model's logits are NaN or infinite where the base's are finite; expected finite ones. Choose another "
            "--dtype or method."
        )
    divergence = 0.0 if equal else _divergence(base_logits, new_logits)
    base_logits, new_logits = base_logits.masked_fill_(broken, 0), new_logits.masked_fill_(broken, 0)
    largest = 0.0 if equal else _largest_difference(base_logits, new_logits)
    progress.advance()
    if replays:
        model = _running(base, base.folder, base.tensors, torch_dtype)
        for replay in replays:
            _compare_layers(model, tokens, replay, new_streams, plan, progress)
    if broken.all():
        progress.warn("every logit of the base is NaN or infinite, so that nothing was compared.")
        return Identity(None, None), None
    stored, run_in = TORCH_NAMES[base.dtype], TORCH_NAMES[dtype]
    sides = (
        f"base and result in {stored}"
        if stored == run_in
        else f"base rounded from {stored} to {run_in}, result in {run_in}"
    )
    return Identity("logits", largest, sides), divergence


def compare_products(base: BaseModel, tensors: Mapping[str, StoredTensor], written: Iterable[OutputTensor]) -> None:
    """Compare quantised weights of the base, and copies of them, as they are read here with what transformers reads of them.

    Args:
        base: The base checkpoint.
        tensors: Tensors of the upscaled model, by full name.
        written: The tensors that were written, with their recipes.

    Raises:
        VerificationError: If a weight is read as other numbers than transformers reads.
    """
    copies: dict[str, list[str]] = {}
    for made in written:
        if isinstance(made.recipe, Copy) and isinstance(base.tensors[made.recipe.source], QUANTISED):
            copies.setdefault(made.recipe.source, []).append(made.name)
    for name, weight in base.tensors.items():
        if not isinstance(weight, QUANTISED):
            continue
        expected = product_of_transformers(weight, base.config)
        for where, other in (
            (f"{name} of the base", weight),
            *((copy, tensors[copy]) for copy in copies.get(name, ())),
        ):
            values = read_tensor(other)
            rounded = expected.to(values.dtype)
            if not _are_same(rounded, values):
                raise VerificationError(
                    f"{where} is read as other numbers than transformers reads of {name}, by up to "
                    f"{_largest_difference(rounded, values):g}; expected the same. Start from the unquantised checkpoint."
                )


def _replays(plan: Plan) -> list[dict[int, int]]:
    """Return passes that map base layers to their copies in the result, as many passes as a layer has copies."""
    passes: list[dict[int, int]] = []
    for index, layer in enumerate(plan.layers):
        if isinstance(layer, Base):
            replay = next((each for each in passes if layer.index not in each), None)
            if replay is None:
                passes.append(replay := {})
            replay[layer.index] = index
    return passes


def _compare_layers(
    model: RunningModel,
    tokens: torch.Tensor,
    replay: Mapping[int, int],
    streams: list[torch.Tensor],
    plan: Plan,
    progress: Progress,
) -> None:
    """Check that layers of the base compute in the result what they compute in the base, for the same input."""

    def compare(number: int, hidden: torch.Tensor) -> None:
        if number == 0:
            return
        progress.advance()
        index = replay.get(number - 1)
        if index is not None and not _are_same(streams[index + 1], hidden):
            raise VerificationError(
                f"layer {index} ({plan.describe(index)}) computes otherwise than base layer {number - 1}, by up to "
                f"{_largest_difference(streams[index + 1], hidden):g}; expected the same bits for the same input. The layers of this "
                "type cannot move; choose a method that adds no layer."
            )

    model.logits(tokens, compare, {layer: streams[index] for layer, index in replay.items()})


def _running(base: BaseModel, folder: Path, tensors: Mapping[str, StoredTensor], dtype: torch.dtype) -> RunningModel:
    """Return a model of the base's family that runs; streamed, unless transformers converts its tensors."""
    if base.layout.is_converted:
        return LoadedModel(folder, dtype)
    return StreamedModel(folder, tensors, dtype)


def _counterparts(plan: Plan) -> list[int]:
    """Return how many base layers the residual stream has passed in front of each layer, and behind the last."""
    passed = [0]
    for layer in plan.layers:
        passed.append(layer.index + 1 if isinstance(layer, Base) else passed[-1])
    return passed


def _are_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def _largest_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    chunks = [(first.double() - second.double()).abs().max() for first, second in _rows(left, right)]
    return torch.stack(chunks).max().item()


def _divergence(left: torch.Tensor, right: torch.Tensor) -> float | None:
    """Return the KL divergence between next-token distributions, mean over tokens with finite logits; None if there are none."""

    def of_rows(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        finite = first.isfinite().all(-1) & second.isfinite().all(-1)
        first, second = first[finite].double().log_softmax(-1), second[finite].double().log_softmax(-1)
        return (first.exp() * (first - second)).sum(-1)

    divergences = torch.cat([of_rows(*rows) for rows in _rows(left, right)])
    return divergences.mean().item() if len(divergences) else None


def _rows(left: torch.Tensor, right: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield corresponding rows of two tensors of the same shape, a few rows at a time."""
    return zip(left.flatten(0, -2).split(_ROWS_AT_ONCE), right.flatten(0, -2).split(_ROWS_AT_ONCE), strict=True)


def _place(number: int | None, plan: Plan) -> str:
    """Return, as text, where two models first differ: in layer `number`, from 1; 0 is in front of all layers, None behind."""
    if number:
        return f"in layer {number - 1} ({plan.describe(number - 1)})"
    return "in the embedding" if number == 0 else "behind the last layer"
