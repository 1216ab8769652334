"""Which value tables layers read: the example of UltraMemV2's table 10, and what is refused."""

import pytest

from midus_hf.config.memories.table_sharing import TableSharing
from midus_hf.config.memories.ultramem import UltraMemOptions

LAYERS = 24
# Tables that layers read, both counted from 1.
TABLE_10 = {
    "noring:4": {1: {1, 2, 3, 4}, 2: {1, 2, 3, 4}, 3: {2, 3, 4, 5}, 4: {3, 4, 5, 6}, 5: {4, 5, 6, 7}, 24: {21, 22, 23, 24}},
    "ring:4": {1: {24, 1, 2, 3}, 2: {1, 2, 3, 4}, 3: {2, 3, 4, 5}, 4: {3, 4, 5, 6}, 5: {4, 5, 6, 7}, 24: {23, 24, 1, 2}},
    "block:4": {1: {1, 2, 3, 4}, 2: {1, 2, 3, 4}, 3: {1, 2, 3, 4}, 4: {1, 2, 3, 4}, 5: {5, 6, 7, 8}, 24: {21, 22, 23, 24}},
}  # fmt: skip


def tables_read(share: str, layer: int, num_layers: int = LAYERS) -> set[int]:
    """The tables, counted from 1, that a layer, counted from 1, reads."""
    sharing = TableSharing.read(share)
    (block,) = [block for block in sharing.blocks(num_layers) if layer - 1 in block]
    stored = sharing.stored(len(block))
    first = sharing.first(layer - 1, stored)
    return {block.start + (first + number) % stored + 1 for number in range(sharing.group)}


@pytest.mark.parametrize("share", TABLE_10)
def test_the_example_of_the_paper(share):
    assert {layer: tables_read(share, layer) for layer in TABLE_10[share]} == TABLE_10[share]


@pytest.mark.parametrize("group", [1, 2, 3, 9, 12])
def test_every_layer_reads_its_own_table_and_as_many_as_it_is_told(group):
    for kind in ("noring", "ring", "block"):
        for layer in range(1, LAYERS + 1):
            if kind == "block" and LAYERS % group:
                continue
            read = tables_read(f"{kind}:{group}", layer)
            assert layer in read and len(read) == group and read <= set(range(1, LAYERS + 1))


def test_in_a_ring_every_table_is_read_by_as_many_layers():
    readers = [layer for layer in range(1, LAYERS + 1) for table in tables_read("ring:9", layer) if table == 1]
    assert readers == [1, 2, 3, 4, 5, 21, 22, 23, 24]
    at_the_end = [layer for layer in range(1, LAYERS + 1) if 1 in tables_read("noring:9", layer)]
    assert at_the_end == [1, 2, 3, 4, 5]


def test_one_table_for_all_and_one_for_each():
    assert tables_read("all", 7) == {1}
    assert TableSharing.read("none").blocks(3) == []


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        ("none", 0),
        ("all", 0),
        ("ring:3", 0),
        ("ring:4", 0),
        ("noring:4", 0),
        ("noring:3", 192 - 13**2),
        ("noring:2", 128 - 11**2),
        ("block:4", 0),
        ("block:3", 2 * (192 - 13**2)),
        ("block:6", 384 - 19**2),
    ],
)
def test_rows_that_no_layer_reads_are_those_that_are_in_no_stretch(share, expected):
    num_layers = 6 if share not in ("block:4", "ring:4", "noring:4") else 8
    options = UltraMemOptions(n=8, k=2, share=share)
    sharing, unread = options.sharing, 0
    for block in sharing.blocks(num_layers):
        stored = sharing.stored(len(block))
        total = stored * options.n**2
        starts = [sharing.first(layer - block.start, stored) * options.n**2 for layer in block]
        read = {(start + row) % total for start in starts for row in range(options.num_rows)}
        unread += total - len(read)
    assert options.unread_rows(num_layers) == unread == expected


@pytest.mark.parametrize("share", ["", "ring", "ring:0", "ring:-1", "Ring:2", "block:2:3"])
def test_other_words_are_refused(share):
    with pytest.raises(ValueError, match=rf"share is '{share}'; expected none, all, noring:G, ring:G or block:G"):
        TableSharing.read(share)


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(
        ValueError, match="share is 'ring:5', but 4 layers have the memory; expected a group of at most"
    ):
        TableSharing.read("ring:5").blocks(4)
    with pytest.raises(ValueError, match="share is 'block:3', which does not divide the 4 layers"):
        TableSharing.read("block:3").blocks(4)
