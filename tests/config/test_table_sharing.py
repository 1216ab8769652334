"""Which value tables layers of UltraMemV2 read: the example of its table 10."""

import pytest

from midus_hf.memories.ultramem.options import UltraMemOptions

LAYERS = 24
# Tables that layers of `ring:4` read, both counted from 1.
TABLE_10 = {1: {24, 1, 2, 3}, 2: {1, 2, 3, 4}, 3: {2, 3, 4, 5}, 4: {3, 4, 5, 6}, 5: {4, 5, 6, 7}, 24: {23, 24, 1, 2}}


def tables_read(share: str, layer: int) -> set[int]:
    """The tables, counted from 1, that a layer, counted from 1, reads."""
    options = UltraMemOptions(n=8, k=2, share=share)
    stored = 1 if share == "all" else LAYERS
    first = options.first_row(layer - 1, stored * 64) // 64
    return {(first + number) % stored + 1 for number in range(options.group)}


def test_the_example_of_the_paper():
    assert {layer: tables_read("ring:4", layer) for layer in TABLE_10} == TABLE_10
    assert tables_read("all", 7) == {1}


@pytest.mark.parametrize("group", [1, 2, 3, 9, 12])
def test_every_layer_reads_its_own_table_and_every_table_is_read_by_as_many(group):
    read = [tables_read(f"ring:{group}", layer) for layer in range(1, LAYERS + 1)]
    assert all(layer in tables and len(tables) == group for layer, tables in enumerate(read, 1))
    assert all(sum(table in tables for tables in read) == group for table in range(1, LAYERS + 1))


@pytest.mark.parametrize(("share", "num_layers"), [("all", 6), ("ring:2", 6), ("ring:3", 6), ("ring:4", 8)])
def test_every_row_of_a_stored_table_is_read_by_some_layer(share, num_layers):
    options = UltraMemOptions(n=8, k=2, share=share)
    total = 64 if share == "all" else num_layers * 64
    starts = [options.first_row(layer, total) for layer in range(num_layers)]
    assert {(start + row) % total for start in starts for row in range(options.num_rows)} == set(range(total))
