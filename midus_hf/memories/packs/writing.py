"""Writing of a bank of packs: the table of names, and keys and values file by file."""

import json
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save

from midus_hf.banks.level_file import SAFETENSORS_DTYPES, file_head
from midus_hf.config.fetched_blocks import BANK_DESCRIPTION, PackLayout
from midus_hf.files.outputs import whole_file
from midus_hf.memories.packs.bank import NAMES_FILE, PACKS_FORMAT, TITLES_FILE, PackBank
from midus_hf.memories.packs.names import NameTable


def name_table(spellings: Mapping[tuple[int, ...], int], vocab_size: int) -> NameTable:
    """Return the table of names.

    Args:
        spellings: The number of an entry, from 1, by the token ids of each spelling of its names.
        vocab_size: V, number of tokens.
    """
    longest = max(map(len, spellings), default=0)
    backwards = torch.full((len(spellings), longest), vocab_size)
    for row, ids in enumerate(spellings):
        backwards[row, : len(ids)] = torch.tensor(ids[::-1])
    lengths = torch.tensor([len(ids) for ids in spellings], dtype=torch.int64)
    entries = torch.tensor(list(spellings.values()), dtype=torch.int64)
    node = torch.zeros(len(spellings), dtype=torch.int64)
    edges, ends, count = [], [], 0
    for back in range(longest):  # edges of one depth are numbered behind those of the depth before, so all ascend
        goes_on = lengths > back
        keys, places = (node[goes_on] * (vocab_size + 1) + backwards[goes_on, back]).unique(return_inverse=True)
        node = node.masked_scatter(goes_on, places + count + 1)
        of_keys = torch.zeros_like(keys)
        is_last = lengths[goes_on] == back + 1
        of_keys[places[is_last]] = entries[goes_on][is_last]
        edges.append(keys)
        ends.append(of_keys)
        count += len(keys)
    none = torch.zeros(0, dtype=torch.int64)
    return NameTable(torch.cat([none, *edges]), torch.cat([none, *ends]), vocab_size, longest)


def write_packs(
    folder: Path,
    layout: PackLayout,
    titles: Sequence[Sequence[str]],
    table: NameTable,
    angles: torch.Tensor,
    lengths: Sequence[int],
    packs: Iterable[torch.Tensor],
    dtype: torch.dtype,
    max_file_bytes: int,
) -> None:
    """Write a bank, whose description is written last.

    Args:
        folder: Folder of the bank, which is created if missing.
        layout: Layout that the model's config implies.
        titles: Names of each entry.
        table: The names' tokens.
        angles: `[L, r]`, float64, angles in radians by which a position rotates the keys of each layer.
        lengths: Tokens of each entry.
        packs: Keys and values of each entry, `[m, L, 2, K, d]`, one after another.
        dtype: Dtype in which they are stored.
        max_file_bytes: Bytes of a file at most, if an entry takes no more.
    """
    folder.mkdir(parents=True, exist_ok=True)
    token_bytes = dtype.itemsize * torch.Size(layout.token_shape).numel()
    groups: list[list[int]] = []
    held = 0  # tokens of the last file
    for length in lengths:
        if not groups or (held + length) * token_bytes > max_file_bytes:
            groups.append([])
            held = 0
        groups[-1].append(length)
        held += length
    source, files, first = iter(packs), [], 1
    for number, group in enumerate(groups, 1):
        name, tokens = f"packs-{number:05}.safetensors", sum(group)
        end = tokens * token_bytes
        described = {
            "dtype": SAFETENSORS_DTYPES[dtype],
            "shape": [tokens, *layout.token_shape],
            "data_offsets": [0, end],
        }
        with whole_file(folder / name) as partial, partial.open("wb") as file:
            file.write(file_head({"packs": described}))
            for length in group:
                pack = next(source)
                assert len(pack) == length, "lengths are those of the packs"
                file.write(pack.detach().to("cpu", dtype).contiguous().view(torch.uint8).numpy().data)
        files.append({"name": name, "first": first, "tokens": tokens})
        first += len(group)
    starts = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    with whole_file(folder / NAMES_FILE) as partial:
        partial.write_bytes(save({"edges": table.edges, "ends": table.ends, "starts": starts, "angles": angles}))
    with whole_file(folder / TITLES_FILE) as partial:
        partial.write_text(json.dumps(titles, ensure_ascii=False) + "\n", encoding="utf-8")
    description = {
        "format": PACKS_FORMAT,
        "layout": layout.to_dict(),
        "vocab_size": table.vocab_size,
        "longest": table.longest,
        "files": files,
    }
    with whole_file(folder / BANK_DESCRIPTION) as partial:
        partial.write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def write_without(bank: PackBank, folder: Path, gone: Collection[int]) -> None:
    """Write a bank without some entries, counted from 1, into another folder, whose files have no byte of them."""
    left = [entry for entry in range(1, len(bank) + 1) if entry not in gone]
    new = {old: number for number, old in enumerate(left, 1)}
    spellings = {ids: new[entry] for ids, entry in _spellings(bank.names).items() if entry in new}
    titles = bank.titles()
    packs = (bank.pack(entry) for entry in left)
    dtype = bank.pack(1).dtype
    largest = max(file["tokens"] for file in bank.description["files"]) * dtype.itemsize
    shutil.rmtree(folder, ignore_errors=True)
    write_packs(
        folder,
        bank.layout,
        [titles[entry - 1] for entry in left],
        name_table(spellings, bank.names.vocab_size),
        bank.angles[list(bank.kinds)],
        [bank.num_tokens(entry) for entry in left],
        packs,
        dtype,
        largest * torch.Size(bank.layout.token_shape).numel(),
    )


def _spellings(table: NameTable) -> dict[tuple[int, ...], int]:
    """Return the entry by the token ids of each spelling in a table."""
    parents, tokens = table.edges // (table.vocab_size + 1), table.edges % (table.vocab_size + 1)
    ids: list[tuple[int, ...]] = [()]
    for parent, token in zip(parents.tolist(), tokens.tolist(), strict=True):
        ids.append((token, *ids[parent]))
    return {ids[node]: entry for node, entry in enumerate(table.ends.tolist(), 1) if entry}
