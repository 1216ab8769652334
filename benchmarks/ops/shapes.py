"""The shapes of the benchmarks of ops, one memory layer of a published model each, and names of providers.

Reports need these without torch installed.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of one memory layer: H heads of width d, n sub-keys per side, of half that width, and k slots retrieved per head."""

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

# The provider that ops choose by themselves.
OURS = "sorted"
# Plain PyTorch under `torch.compile`, which ops should beat.
COMPILED = ("compiled", "expand-compiled", "expand-max-autotune")


@dataclass(frozen=True)
class Case:
    """An op and the inputs that it is measured on; `popularity` is that of slots, and `dtype` the name of a torch dtype."""

    op: str
    shape: Shape
    tokens: int
    popularity: str
    dtype: str
    device: str

    def __str__(self) -> str:
        return f"{self.op} {self.shape.name} {self.tokens} tokens {self.popularity} {self.dtype}"
