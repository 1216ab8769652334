"""The layer plan: an ordered list, one entry an output layer, that says where each layer comes from."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from upscalers.engine.errors import RequestError


@dataclass(frozen=True)
class Base:
    """A layer taken over from base layer `index`."""

    index: int


@dataclass(frozen=True)
class New:
    """An inserted layer between base layers `previous` and `next`; None where there is no base layer on that side."""

    previous: int | None
    next: int | None

    @property
    def place(self) -> str:
        """Where it stands, in words."""
        neighbours = [f"base {index}" for index in (self.previous, self.next) if index is not None]
        return f"{'between' if len(neighbours) == 2 else 'beside'} {' and '.join(neighbours)}"


@dataclass(frozen=True)
class Plan:
    """What every layer of the upscaled model is made from.

    Args:
        layers: One entry an output layer.
        num_base_layers: L, layers of the base.
    """

    layers: tuple[Base | New, ...]
    num_base_layers: int

    @property
    def num_layers(self) -> int:
        """L + K, layers of the upscaled model."""
        return len(self.layers)

    @property
    def new_indices(self) -> list[int]:
        """Indices of the inserted layers in the upscaled model."""
        return [index for index, layer in enumerate(self.layers) if isinstance(layer, New)]

    def to_list(self) -> list[dict[str, int | None]]:
        """The plan as plain data: `{"base": i}` or `{"previous": i, "next": j}` a layer."""
        return [
            {"base": layer.index} if isinstance(layer, Base) else {"previous": layer.previous, "next": layer.next}
            for layer in self.layers
        ]

    @classmethod
    def from_list(cls, layers: Iterable[dict[str, int | None]], num_base_layers: int) -> "Plan":
        """Read what `to_list` wrote."""
        return cls(
            tuple(Base(**_renamed(layer)) if "base" in layer else New(**layer) for layer in layers), num_base_layers
        )


def _renamed(layer: dict[str, int | None]) -> dict[str, int]:
    index = layer["base"]
    assert index is not None
    return {"index": index}


def insertion_plan(num_base_layers: int, new_indices: Sequence[int]) -> Plan:
    """Plan the insertion of new layers at given indices of the upscaled model.

    Args:
        num_base_layers: L, layers of the base.
        new_indices: Ascending indices into the L + K layers of the upscaled model.

    Raises:
        RequestError: If the indices are not ascending, or out of range.
    """
    total = num_base_layers + len(new_indices)
    listed = ",".join(map(str, new_indices))
    if list(new_indices) != sorted(set(new_indices)):
        raise RequestError(
            f"placement is {listed}; expected ascending indices without repetition. Sort them and drop repeats."
        )
    if new_indices and not (0 <= new_indices[0] and new_indices[-1] < total):
        raise RequestError(
            f"placement is {listed}; expected indices from 0 to {total - 1}, counted in the upscaled model of "
            f"{num_base_layers} + {len(new_indices)} layers."
        )
    inserted = set(new_indices)
    layers: list[Base | New] = []
    taken = 0
    for index in range(total):
        if index in inserted:
            layers.append(New(taken - 1 if taken > 0 else None, taken if taken < num_base_layers else None))
        else:
            layers.append(Base(taken))
            taken += 1
    assert taken == num_base_layers
    return Plan(tuple(layers), num_base_layers)
