"""What memories that retrieve slots have in common: queries, weights, and a gate on what they return."""

import dataclasses
import math

import torch
from torch import nn

from midus_hf.memory.registry import MemoryModule, MemoryOptions

QUERY_NORMS = ("none", "batch", "layer")
GATES = ("none", "token", "head")
_BATCH_MOMENTUM, _EPS = 0.1, 1e-5


@dataclasses.dataclass(kw_only=True)
class RetrievalOptions(MemoryOptions):
    """Options of every memory that retrieves slots.

    Args:
        layers: Indices of the layers that hold this memory, ascending.
        k: Slots retrieved a head and token. Default: 4.
        query_norm: `"none"`, `"layer"` over the features of each head's query, or `"batch"` over all tokens of a
            batch, padding included, which in training lets a token see the statistics of later ones: train it on packed
            sequences. A batch norm whose gain is frozen uses its running statistics and leaves them as they are. Default:
            `"none"`.
        temperature: Scores are divided by it before the softmax. Default: 1.
        gate: `"none"`, or a sigmoid of the attention output that scales what a `"token"` retrieves, or what each
            `"head"` of it does. It starts at one half. Default: `"none"`.
        inner_residual: Whether the block's input is added to the attention output that the memory reads (MIDUS,
            equation 6). Default: false.

    Raises:
        ValueError: If a value has another type or lies outside its range.
    """

    k: int = 4
    query_norm: str = "none"
    temperature: float = 1.0
    gate: str = "none"
    inner_residual: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("k", self.k)
        check_choice("query_norm", self.query_norm, QUERY_NORMS)
        check_choice("gate", self.gate, GATES)
        check_switch("inner_residual", self.inner_residual)
        number = type(self.temperature) in (int, float)
        if not number or not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature is {self.temperature!r}; expected a number above 0.")


class RetrievalMemory(MemoryModule):
    """A memory that asks with a query a head, weighs what it finds by a softmax, and may gate the outcome.

    Args:
        query_width: Width of one head's query.
        input_width: Width of the attention output that the gate reads.
        num_heads: H.
        k: Slots retrieved a head and token.
        query_norm: As in `RetrievalOptions`.
        temperature: As in `RetrievalOptions`.
        gate: As in `RetrievalOptions`.
    """

    site = "inserted"
    norm_parameters = ("query_norm_weight", "query_norm_bias")
    value_bank: torch.Tensor
    query_mean: torch.Tensor
    query_variance: torch.Tensor

    def __init__(
        self,
        *,
        query_width: int,
        input_width: int,
        num_heads: int,
        k: int,
        query_norm: str = "none",
        temperature: float = 1.0,
        gate: str = "none",
    ):
        super().__init__()
        self.num_heads, self.query_width = num_heads, query_width
        self.k, self.query_norm, self.temperature, self.gate = k, query_norm, temperature, gate
        if query_norm != "none":
            self.query_norm_weight = nn.Parameter(torch.empty(num_heads, query_width))
            self.query_norm_bias = nn.Parameter(torch.empty(num_heads, query_width))
        if query_norm == "batch":
            self.register_buffer("query_mean", torch.empty(num_heads, query_width))
            self.register_buffer("query_variance", torch.empty(num_heads, query_width))
        if gate != "none":
            gates = num_heads if gate == "head" else 1
            self.gate_weight = nn.Parameter(torch.empty(gates, input_width))
            self.gate_bias = nn.Parameter(torch.empty(gates))

    def init_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator | None = None) -> None:
        """Norms start as plain normalisation, gates half open; the rest is the subclass's."""
        if name in ("query_norm_weight", "query_variance"):
            tensor.fill_(1.0)
        elif name in ("query_norm_bias", "query_mean", "gate_weight", "gate_bias"):
            tensor.zero_()
        else:
            super().init_parameter(name, tensor, generator)

    @property
    def num_slots(self) -> int:
        """N, the slots that each head chooses among."""
        return self.value_bank.shape[-2]

    def queries(self, attention_output: torch.Tensor, track_statistics: bool = True) -> torch.Tensor:
        """What each head asks with.

        Args:
            attention_output: `[B, T, W]`.
            track_statistics: Whether a batch norm that trains learns from these tokens: not where they are looked at
                beside the forward pass. Default: true.

        Returns:
            `[B, T, H, query_width]`.
        """
        raise TypeError(f"{type(self).__name__} does not say what it asks with.")

    def retrieve(self, attention_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights, float32, and slots, int64, that each head reads, both `[B, T, H, k]`; nothing is changed."""
        scores, slots = self.select(self.queries(attention_output, track_statistics=False))
        return self.weigh(scores), slots

    def sub_key_scores(self, query: torch.Tensor) -> list[torch.Tensor]:
        """Scores `[..., H, n]` of each side's sub-keys, float32 at least, for queries `[..., H, query_width]`."""
        raise TypeError(f"{type(self).__name__} does not say how it scores its keys.")

    def select(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores, descending, and slots, both `[B, T, H, k]`, of the best slots for each query."""
        raise TypeError(f"{type(self).__name__} does not say how it selects slots.")

    def weigh(self, scores: torch.Tensor) -> torch.Tensor:
        """The softmax of the scores over the temperature."""
        return (scores / self.temperature).softmax(dim=-1)

    def normalised(self, query: torch.Tensor, track_statistics: bool = True) -> torch.Tensor:
        """The query `[..., H, query_width]` after the norm of the options, computed in float32 at least."""
        if self.query_norm == "none":
            return query
        wide = query.to(torch.promote_types(query.dtype, torch.float32))
        if self.query_norm == "layer":
            variance, mean = torch.var_mean(wide, dim=-1, correction=0, keepdim=True)
        else:
            mean, variance = self._batch_statistics(wide, track_statistics)
        scaled = (wide - mean) * torch.rsqrt(variance + _EPS)
        return (scaled * self.query_norm_weight.to(wide.dtype) + self.query_norm_bias.to(wide.dtype)).to(query.dtype)

    def gated(self, attention_output: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Scale what was retrieved.

        Args:
            attention_output: `[..., W]`.
            output: `[..., H, v]`, or `[..., D]` if there is one gate a token.
        """
        if self.gate == "none":
            return output
        opened = torch.sigmoid(nn.functional.linear(attention_output, self.gate_weight, self.gate_bias))
        if output.dim() > attention_output.dim():
            opened = opened.unsqueeze(-1)  # [..., H or 1, 1]
        return output * opened

    def _batch_statistics(self, query: torch.Tensor, track: bool) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = query.shape[:-2].numel()
        learns = self.training and self.query_norm_weight.requires_grad
        if not learns or tokens == 0:
            return self.query_mean.to(query.dtype), self.query_variance.to(query.dtype)
        variance, mean = torch.var_mean(query.flatten(0, -3), dim=0, correction=0)  # [H, query_width]
        if track and not recomputing():
            with torch.no_grad():
                unbiased = variance * (tokens / max(tokens - 1, 1))
                self.query_mean.lerp_(mean.to(self.query_mean.dtype), _BATCH_MOMENTUM)
                self.query_variance.lerp_(unbiased.to(self.query_variance.dtype), _BATCH_MOMENTUM)
        return mean, variance


def check_whole(name: str, value: object) -> None:
    """Refuse what is not a whole number."""
    if type(value) is not int:
        raise ValueError(f"{name} is {value!r}; expected a whole number.")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse what is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, choices))}.")


def check_switch(name: str, value: object) -> None:
    """Refuse what is neither true nor false."""
    if type(value) is not bool:
        raise ValueError(f"{name} is {value!r}; expected true or false.")


def recomputing() -> bool:
    """Whether this forward pass runs inside a backward pass, as activation checkpointing repeats it."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
