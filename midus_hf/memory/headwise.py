"""The head-wise memory layer (HML) of MIDUS."""

import dataclasses
import math
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from midus_hf.memory.kept_values import KeptValues
from midus_hf.memory.registry import register_memory
from midus_hf.memory.retrieval import RetrievalMemory, RetrievalOptions, check_choice, check_switch, check_whole
from midus_hf.ops.headwise_memory import MOST_EXPANDED, expand_values, headwise_memory
from midus_hf.ops.product_key import product_key_topk, sub_key_scores

VALUES = ("expanded", "shared", "own")


@dataclasses.dataclass(kw_only=True)
class HeadwiseOptions(RetrievalOptions):
    """Options of a head-wise memory, beside those of `RetrievalOptions`.

    Args:
        n: Sub-keys per side; every head addresses `n * n` slots. Default: 64.
        values: `"expanded"`, one bank that each head transforms (HIVE, equation 16); `"shared"`, one bank that all
            heads read as it is; or `"own"`, a bank per head. Default: `"expanded"`.
        output_projection: Whether the attention in front keeps its output projection. Default: false.

    Raises:
        ValueError: If `n` or `k` is not a whole number or not positive, `k` exceeds `n`, or another value is not one
            of those named.
    """

    n: int = 64
    values: str = "expanded"
    output_projection: bool = False

    @property
    def keeps_output_projection(self) -> bool:
        return self.output_projection

    @property
    def adds_block_input(self) -> bool:
        return self.inner_residual

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("n", self.n)
        check_choice("values", self.values, VALUES)
        check_switch("output_projection", self.output_projection)
        if self.n < 1:
            raise ValueError(f"n is {self.n}; expected at least one sub-key a side.")
        if not 1 <= self.k <= self.n:
            raise ValueError(f"k is {self.k}; expected 1 <= k <= n = {self.n}. Lower k or raise n.")


@register_memory("headwise", HeadwiseOptions)
class HeadwiseMemory(RetrievalMemory):
    """Memory a head, queried by the head's attention output (MIDUS, section 4.2, equations 11 to 17).

    Args:
        hidden_size: D, the width of the residual stream; a multiple of `num_heads`.
        num_heads: H, query heads of the attention in front.
        head_dim: d, width of one head's share of the attention output; even. It need not be D / H.
        n: Sub-keys per side. Default: 64.
        k: Slots retrieved a head and token. Default: 4.
        values: As in `HeadwiseOptions`. Default: `"expanded"`.
        norm_and_gate: `query_norm`, `temperature` and `gate`, as in `RetrievalOptions`.

    Raises:
        ValueError: If `hidden_size` is no multiple of `num_heads`, or `head_dim` is odd.
    """

    key_value_parameters = ("row_keys", "column_keys", "value_bank")
    value_parameters = ("value_bank",)
    transform_parameters = ("value_transform",)
    kept: KeptValues | None = None

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        n: int = 64,
        k: int = 4,
        values: str = "expanded",
        **norm_and_gate: Any,
    ):
        if hidden_size % num_heads:
            raise ValueError(
                f"hidden_size is {hidden_size}; expected a multiple of the {num_heads} attention heads, "
                "since each head writes an equal share of the residual stream."
            )
        if head_dim % 2:
            raise ValueError(f"head_dim is {head_dim}; expected an even number, half for rows and half for columns.")
        super().__init__(
            query_width=head_dim, input_width=num_heads * head_dim, num_heads=num_heads, k=k, **norm_and_gate
        )
        self.head_dim, self.value_dim, self.n, self.values = head_dim, hidden_size // num_heads, n, values
        self.row_keys = nn.Parameter(torch.empty(num_heads, n, head_dim // 2))
        self.column_keys = nn.Parameter(torch.empty(num_heads, n, head_dim // 2))
        banks = (num_heads,) if values == "own" else ()
        self.value_bank = nn.Parameter(torch.empty(*banks, n * n, self.value_dim))
        if values == "expanded":
            self.value_transform = nn.Parameter(torch.empty(num_heads, self.value_dim, self.value_dim))
            if num_heads * self.value_bank.numel() <= MOST_EXPANDED:
                self.kept = KeptValues(("value_bank", "value_transform"), expand_values)
        self.reset_parameters()

    @classmethod
    def from_config(cls, config: PreTrainedConfig, options: HeadwiseOptions) -> "HeadwiseMemory":
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        if options.inner_residual and not options.output_projection and heads * head_dim != config.hidden_size:
            raise ValueError(
                f"inner_residual adds the block's input of width {config.hidden_size} to an attention output of width "
                f"{heads * head_dim}; expected equal widths. Set output_projection to true as well."
            )
        return cls(
            hidden_size=config.hidden_size,
            num_heads=heads,
            head_dim=config.hidden_size // heads if options.output_projection else head_dim,
            n=options.n,
            k=options.k,
            values=options.values,
            query_norm=options.query_norm,
            temperature=options.temperature,
            gate=options.gate,
        )

    def init_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator | None = None) -> None:
        """Values start at zero, so that the layer returns zero; nothing else does, so that it can leave zero.

        The paper gives the values alone. Keys follow product-key memory (Lample et al. 2019): uniform in
        +-1 / sqrt(d / 2). Transforms are normal with variance 1 / v, which keeps the scale of a value.
        """
        if name == "value_bank":
            tensor.zero_()
        elif name == "value_transform":
            tensor.normal_(0.0, 1.0 / math.sqrt(self.value_dim), generator=generator)
        elif name in ("row_keys", "column_keys"):
            bound = 1.0 / math.sqrt(self.head_dim // 2)
            tensor.uniform_(-bound, bound, generator=generator)
        else:
            super().init_parameter(name, tensor, generator)

    def queries(self, attention_output: torch.Tensor, track_statistics: bool = True) -> torch.Tensor:
        return self.normalised(attention_output.unflatten(-1, (self.num_heads, self.head_dim)), track_statistics)

    def select(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return product_key_topk(query, self.row_keys, self.column_keys, self.k)

    def sub_key_scores(self, query: torch.Tensor) -> list[torch.Tensor]:
        return list(sub_key_scores(query, self.row_keys, self.column_keys))

    def forward(
        self, attention_output: torch.Tensor, residual: torch.Tensor | None = None, backend: str = "auto"
    ) -> torch.Tensor:
        """Retrieve what every head's attention output asks for.

        Args:
            attention_output: `[B, T, H * d]`, the heads' outputs side by side.
            residual: `[B, T, D]`, added to what is retrieved. Default: none.
            backend: Body of the op. Default: `"auto"`.

        Returns:
            `[B, T, D]`.
        """
        bank: torch.Tensor = self.value_bank
        transform: torch.Tensor | None = getattr(self, "value_transform", None)
        if self.kept is not None:
            kept = self.kept.serve(self, attention_output)
            bank, transform = (bank, transform) if kept is None else (kept, None)
        by_head = None
        if residual is not None and self.gate == "none":
            by_head = residual.unflatten(-1, (self.num_heads, self.value_dim))
        output = headwise_memory(
            self.queries(attention_output),
            self.row_keys,
            self.column_keys,
            bank,
            transform,
            self.k,
            residual=by_head,
            temperature=self.temperature,
            backend=backend,
        )  # [B, T, H, D / H]
        output = self.gated(attention_output, output).flatten(-2)
        return output if residual is None or self.gate == "none" else (residual + output).to(residual.dtype)

    def extra_repr(self) -> str:
        sizes: dict[str, Any] = {"num_heads": self.num_heads, "head_dim": self.head_dim, "value_dim": self.value_dim}
        sizes |= {"n": self.n, "k": self.k}
        words = {"values": self.values, "query_norm": self.query_norm, "gate": self.gate}
        chosen: dict[str, Any] = {name: value for name, value in words.items() if value not in ("expanded", "none")}
        if self.temperature != 1:
            chosen["temperature"] = self.temperature
        return ", ".join(f"{name}={value}" for name, value in (sizes | chosen).items())
