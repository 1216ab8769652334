"""Which tensors layers give for later ones, and which they take of earlier ones: outputs that skip layers, slots of the depth."""

from midus_config.memory_entries import Memories, MemoryEntry
from midus_hf.models.memory_inputs import Carried


def given_at(entry: MemoryEntry, layer: int) -> tuple[Carried, ...]:
    """What a memory gives for later layers at one of its layers."""
    if layer not in entry.layers:
        return ()
    index = entry.layers.index(layer)
    skips = (Carried(entry.name, layer),) if entry.into and entry.into[index] != layer else ()
    return (*skips, *(Carried(entry.name, layer, part) for part in entry.options.gives(index, len(entry.layers))))


def taken_at(entry: MemoryEntry, layer: int) -> tuple[Carried, ...]:
    """What a layer takes of what a memory gave at earlier layers."""
    skips = tuple(Carried(entry.name, read) for read in skips_into(entry, layer) if read != layer)
    if layer not in entry.layers:
        return skips
    taken = entry.options.takes(entry.layers.index(layer))
    return (*skips, *(Carried(entry.name, entry.layers[index], part) for index, part in taken))


def skips_into(entry: MemoryEntry, layer: int) -> tuple[int, ...]:
    """The layers that a memory reads at, where it adds what it read behind another."""
    return tuple(read for read, into in zip(entry.layers, entry.into, strict=False) if into == layer)


def taken_last_at(memories: Memories, layer: int) -> tuple[Carried, ...]:
    """What is given or taken at a layer, and by no later one."""
    return tuple(
        carried
        for entry in memories.attached.values()
        for carried in (*taken_at(entry, layer), *given_at(entry, layer))
        if not any(carried in taken_at(entry, later) for later in range(layer + 1, memories.sizes.num_layers))
    )
