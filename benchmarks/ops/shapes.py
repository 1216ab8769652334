"""The shapes of the benchmarks of ops: one memory layer of a published model each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of one memory layer.

    Args:
        name: Name of the model.
        heads: Number of heads, H.
        head_dim: Width of a head, d; sub-keys are half as wide, values as wide.
        n: Sub-keys per side. Default: 64.
        k: Slots retrieved per head. Default: 4.
    """

    name: str
    heads: int
    head_dim: int
    n: int = 64
    k: int = 4

    @property
    def slots(self) -> int:
        """Number of slots, N = n * n."""
        return self.n * self.n

    @property
    def width(self) -> int:
        """Width of the residual stream, D = H * d."""
        return self.heads * self.head_dim


# Shapes by name; `tiny` is for tests.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama-3.2-1b", 32, 64),
        Shape("llama-3.1-8b", 32, 128),
        Shape("smollm2-135m", 9, 64),
        Shape("tiny", 2, 16, 8),
    )
}

POPULARITIES = ("uniform", "zipf")
MODES = ("forward", "backward", "forward+backward")


@dataclass(frozen=True)
class Case:
    """An op and the inputs that it is measured on.

    Args:
        op: Name of the op.
        shape: Sizes of the memory.
        tokens: Number of tokens, S.
        popularity: Popularity of slots, `"uniform"` or `"zipf"`.
        dtype: Name of a torch dtype.
        device: `"cpu"` or `"cuda"`.
    """

    op: str
    shape: Shape
    tokens: int
    popularity: str
    dtype: str
    device: str

    def __str__(self) -> str:
        return f"{self.op} {self.shape.name} {self.tokens} tokens {self.popularity} {self.dtype}"
