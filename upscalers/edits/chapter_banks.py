"""Banks of a checkpoint's memory of chapters, and the routers that open chapters."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from midus_hf.config.memories.chapters import ChaptersOptions
from midus_hf.config.memory_entries import ATTACHED, TABLES, MemoryEntry
from upscalers.checkpoint.base_model import BaseModel
from upscalers.request.errors import RequestError


@dataclass(frozen=True)
class Bank:
    """One bank, and the routers of the layers that read the bank.

    Args:
        number: Number of the bank among the banks of its memory, from 0.
        layers: Indices of the layers that read the bank.
        rows: Full names of the tensors with a row per memory token, in the order of `row_names`.
        router_weights: Full names of router weights, one tensor per layer with a row per chapter.
        router_biases: Full names of router biases, one tensor per layer with an entry per chapter.
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
        model: The opened checkpoint.
        entry: Entry of the memory in the config's `memory` list.
        options: Options in the entry.
    """

    model: BaseModel
    entry: MemoryEntry
    options: ChaptersOptions

    @property
    def name(self) -> str:
        """Name of the memory in its config entry and its tensors."""
        return self.entry.name

    @cached_property
    def banks(self) -> tuple[Bank, ...]:
        """Banks of the memory; if layers do not share banks, each layer has one."""
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
        """Return the bank of a number, or all banks for None.

        Raises:
            RequestError: If there is no bank of this number.
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


# Dtype of integer rows, as safetensors names it, by the number of bits.
STORED_INTEGERS = {8: "I8", 4: "U8"}


def row_names(bank_bits: int | None) -> tuple[str, ...]:
    """Return the names of a bank's tensors that have a row per memory token.

    A bank with a `bank_rank` also has a `bank_transform`, which has no row per memory token.

    Args:
        bank_bits: Bits per number of a rounded bank, 8 or 4; None for a bank that is not rounded.
    """
    return ("bank",) if bank_bits is None else ("bank_integers", "bank_scales")


def find_memories(model: BaseModel) -> dict[str, ChapterMemory]:
    """Return the memories of chapters that a checkpoint has, by name.

    Raises:
        RequestError: If the checkpoint has none.
    """
    memories = {
        name: ChapterMemory(model, entry, entry.options)
        for name, entry in model.memories.attached.items()
        if isinstance(entry.options, ChaptersOptions)
    }
    if not memories:
        raise RequestError(
            f"{model.folder} has no memory of type 'chapters'; expected a model with one. Make it with 'upscale --method moc'."
        )
    return memories


def find_memory(model: BaseModel, name: str | None) -> ChapterMemory:
    """Return the memory of chapters of a name, or the only one for None.

    Raises:
        RequestError: If there is none of this name, or several and `name` is None.
    """
    memories = find_memories(model)
    if name is None and len(memories) > 1:
        raise RequestError(
            f"the model has several memories of chapters, {', '.join(memories)}; expected one of them. Pass --memory NAME."
        )
    if name is not None and name not in memories:
        raise RequestError(
            f"memory is {name!r}; expected the name of a memory of chapters, of which the model has: {', '.join(memories)}."
        )
    return next(iter(memories.values())) if name is None else memories[name]


def check_all(verb: str, memory: ChapterMemory, banks: Sequence[Bank]) -> None:
    """Check that an edit, named by `verb`, covers all banks of a memory, since the edit changes sizes that the banks share.

    Raises:
        RequestError: If the memory has other banks.
    """
    if len(banks) < len(memory.banks):
        raise RequestError(
            f"bank is {banks[0].number}; expected no single bank to {verb}, since the {len(memory.banks)} banks of memory "
            f"{memory.name!r} have the same sizes. Leave --bank out."
        )
