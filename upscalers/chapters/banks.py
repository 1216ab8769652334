"""The banks of a checkpoint's memory of chapters, and the routers that open them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from midus_hf.config.memories.chapters import ChaptersOptions
from midus_hf.config.memory_entries import ATTACHED, TABLES, MemoryEntry
from upscalers.checkpoint.base_model import BaseModel
from upscalers.request.errors import RequestError


@dataclass(frozen=True)
class Bank:
    """One bank, and the routers of the layers that read it.

    Args:
        number: Among the banks of its memory.
        layers: Indices of those layers.
        rows: Full names of the tensors that have a row for each memory token, in the order of `row_names`.
        router_weights: Full names, one per layer: a row for each chapter.
        router_biases: Full names, one per layer: an entry for each chapter.
    """

    number: int
    layers: tuple[int, ...]
    rows: tuple[str, ...]
    router_weights: tuple[str, ...]
    router_biases: tuple[str, ...]


@dataclass(frozen=True)
class ChapterMemory:
    """A memory of chapters in a checkpoint.

    Args:
        model: The checkpoint.
        entry: Of its config's `memory` list.
        options: Of the entry.
    """

    model: BaseModel
    entry: MemoryEntry
    options: ChaptersOptions

    @property
    def name(self) -> str:
        """What its tensors and its entry are called by."""
        return self.entry.name

    @cached_property
    def banks(self) -> tuple[Bank, ...]:
        """Its banks; where layers share none, each layer has one."""
        tables = self.model.memories.tables(self.name)
        if tables:
            shared = f"{self.model.prefix}{TABLES}.{self.name}"
            return tuple(
                self._bank(number, of_bank.layers, f"{shared}.{number}.") for number, of_bank in enumerate(tables)
            )
        return tuple(
            self._bank(number, (layer,), self._in_layer(layer, "")) for number, layer in enumerate(self.entry.layers)
        )

    def chosen_banks(self, number: int | None) -> tuple[Bank, ...]:
        """The bank of a number, or all of them for None.

        Raises:
            RequestError: If there is no such bank.
        """
        if number is None:
            return self.banks
        if not 0 <= number < len(self.banks):
            raise RequestError(
                f"bank is {number}; expected a number from 0 to {len(self.banks) - 1}, the banks of memory {self.name!r}."
            )
        return (self.banks[number],)

    def _bank(self, number: int, layers: tuple[int, ...], prefix: str) -> Bank:
        return Bank(
            number,
            layers,
            tuple(prefix + name for name in row_names(self.options.bank_bits)),
            tuple(self._in_layer(layer, "router_weight") for layer in layers),
            tuple(self._in_layer(layer, "router_bias") for layer in layers),
        )

    def _in_layer(self, layer: int, name: str) -> str:
        return self.model.new_name(layer, f"{ATTACHED}.{self.name}.{name}")


STORED_INTEGERS = {8: "I8", 4: "U8"}
"""The container's name of what rows of integers are stored as, by their bits."""


def row_names(bank_bits: int | None) -> tuple[str, ...]:
    """Names of the tensors of a bank that have a row for each memory token, or for its first factor.

    Args:
        bank_bits: As the options have it.
    """
    return ("bank",) if bank_bits is None else ("bank_integers", "bank_scales")


def find_memories(model: BaseModel) -> dict[str, ChapterMemory]:
    """The memories of chapters that a checkpoint has, by name.

    Raises:
        RequestError: If it has none.
    """
    found = {
        name: ChapterMemory(model, entry, entry.options)
        for name, entry in model.memories.attached.items()
        if isinstance(entry.options, ChaptersOptions)
    }
    if not found:
        raise RequestError(
            f"{model.folder} has no memory of type 'chapters'; expected a model with one. Make it with 'upscale --method moc'."
        )
    return found


def find_memory(model: BaseModel, name: str | None) -> ChapterMemory:
    """The memory of chapters of that name, or for None the only one.

    Raises:
        RequestError: If there is none, or nothing says which of several.
    """
    found = find_memories(model)
    if name is None and len(found) > 1:
        raise RequestError(
            f"the model has several memories of chapters, {', '.join(found)}; expected one of them. Pass --memory NAME."
        )
    if name is not None and name not in found:
        raise RequestError(
            f"memory is {name!r}; expected the name of a memory of chapters, of which the model has: {', '.join(found)}."
        )
    return next(iter(found.values())) if name is None else found[name]


def check_all(verb: str, memory: ChapterMemory, banks: Sequence[Bank]) -> None:
    """Check that an edit of what all banks of a memory have in common is one of all.

    Args:
        verb: What the edit does, for the message.
        memory: That is edited.
        banks: Those of its banks that are.

    Raises:
        RequestError: If there are others.
    """
    if len(banks) < len(memory.banks):
        raise RequestError(
            f"bank is {banks[0].number}; expected none to {verb}, for the {len(memory.banks)} banks of memory {memory.name!r} "
            "have their sizes in common. Leave --bank out."
        )
