"""The head-wise memory layer (HML) of MIDUS."""

import dataclasses
import math

import torch
from torch import nn
from transformers import PreTrainedConfig

from midus_hf.memory.registry import MemoryModule, MemoryOptions, register_memory
from midus_hf.ops.headwise_memory import headwise_memory


@dataclasses.dataclass(kw_only=True)
class HeadwiseOptions(MemoryOptions):
    """Options of a head-wise memory.

    Args:
        layers: Indices of the layers that hold this memory, ascending.
        n: Sub-keys a side; every head addresses `n * n` slots. Default: 64.
        k: Slots retrieved a head and token. Default: 4.

    Raises:
        ValueError: If `n` or `k` is not a whole number or not positive, or `k` exceeds `n`.
    """

    n: int = 64
    k: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("n", "k"):
            if type(getattr(self, name)) is not int:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected a whole number.")
        if self.n < 1:
            raise ValueError(f"n is {self.n}; expected at least one sub-key a side.")
        if not 1 <= self.k <= self.n:
            raise ValueError(f"k is {self.k}; expected 1 <= k <= n = {self.n}. Lower k or raise n.")


@register_memory("headwise", HeadwiseOptions)
class HeadwiseMemory(MemoryModule):
    """Memory a head, queried by the head's attention output (MIDUS, section 4.2, equations 11 to 17).

    Args:
        hidden_size: D, the width of the residual stream; a multiple of `num_heads`.
        num_heads: H, query heads of the attention in front.
        head_dim: d, width of one head's attention output; even. It need not be D / H.
        n: Sub-keys a side. Default: 64.
        k: Slots retrieved a head. Default: 4.

    Raises:
        ValueError: If `hidden_size` is no multiple of `num_heads`, or `head_dim` is odd.
    """

    site = "inserted"
    key_value_parameters = ("row_keys", "column_keys", "value_bank")
    value_parameters = ("value_bank",)

    def __init__(self, *, hidden_size: int, num_heads: int, head_dim: int, n: int = 64, k: int = 4):
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(
                f"hidden_size is {hidden_size}; expected a multiple of the {num_heads} attention heads, "
                "since each head writes an equal share of the residual stream."
            )
        if head_dim % 2:
            raise ValueError(f"head_dim is {head_dim}; expected an even number, half for rows and half for columns.")
        self.num_heads, self.head_dim, self.value_dim = num_heads, head_dim, hidden_size // num_heads
        self.n, self.k = n, k
        self.row_keys = nn.Parameter(torch.empty(num_heads, n, head_dim // 2))
        self.column_keys = nn.Parameter(torch.empty(num_heads, n, head_dim // 2))
        self.value_bank = nn.Parameter(torch.empty(n * n, self.value_dim))
        self.value_transform = nn.Parameter(torch.empty(num_heads, self.value_dim, self.value_dim))
        self.reset_parameters()

    @classmethod
    def from_config(cls, config: PreTrainedConfig, options: HeadwiseOptions) -> "HeadwiseMemory":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            head_dim=head_dim,
            n=options.n,
            k=options.k,
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
        else:
            bound = 1.0 / math.sqrt(self.head_dim // 2)
            tensor.uniform_(-bound, bound, generator=generator)

    def forward(self, attention_output: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        """Retrieve what every head's attention output asks for.

        Args:
            attention_output: `[B, T, H * d]`, the heads' outputs side by side, before any output projection.
            backend: Body of the op. Default: `"auto"`.

        Returns:
            `[B, T, D]`, to be added to the residual stream.
        """
        query = attention_output.unflatten(-1, (self.num_heads, self.head_dim))  # [B, T, H, d]
        output = headwise_memory(
            query, self.row_keys, self.column_keys, self.value_bank, self.value_transform, self.k, backend
        )  # [B, T, H, D / H]
        return output.flatten(-2)

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, value_dim={self.value_dim}, n={self.n}, k={self.k}"
        )
