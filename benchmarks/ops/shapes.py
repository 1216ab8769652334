"""The shapes that ops are measured at: those of one memory layer of a published model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of one memory layer.

    Args:
        name: Of the model.
        heads: H.
        head_dim: d; sub-keys are half as wide, values as wide.
        n: Sub-keys a side. Default: 64.
        k: Slots retrieved a head. Default: 4.
    """

    name: str
    heads: int
    head_dim: int
    n: int = 64
    k: int = 4

    @property
    def slots(self) -> int:
        """N = n * n."""
        return self.n * self.n

    @property
    def width(self) -> int:
        """D = H * d, of the residual stream."""
        return self.heads * self.head_dim


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama-3.2-1b", 32, 64),
        Shape("llama-3.1-8b", 32, 128),
        Shape("smollm2-135m", 9, 64),
        Shape("tiny", 2, 16, 8),
    )
}
"""By name; `tiny` is for tests."""

POPULARITIES = ("uniform", "zipf")
MODES = ("forward", "backward", "forward+backward")


@dataclass(frozen=True)
class Case:
    """One row's question: which op, on what.

    Args:
        op: Name.
        shape: Of the memory.
        tokens: S.
        popularity: `"uniform"` or `"zipf"`, of slots.
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
