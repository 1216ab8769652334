"""How many parameters fetched memories and their banks have: the paper's tables and appendices."""

import pytest
from memory.hierarchical_memories import TYPES, layout_of

from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memories.hierarchical.options import HierFFNOptions

MHA = {"hidden_size": 24, "num_heads": 5, "head_dim": 6, "intermediate_size": 40, "num_layers": 7}


@pytest.mark.parametrize(
    ("kind", "of_model"),
    [
        ("hier-lora-qk", lambda d, df, h, dh: 2 * (d + h * dh)),
        ("hier-lora-vo", lambda d, df, h, dh: 2 * (d + h * dh)),
        ("hier-lora-ffn", lambda d, df, h, dh: 3 * (d + df)),
        ("hier-kv", lambda d, df, h, dh: 2 * h * dh),
        ("hier-ffn", lambda d, df, h, dh: 3 * d),
    ],
)
def test_sizes_are_those_of_appendix_i(kind, of_model):
    """For a model with as many key and value heads as query heads, which the paper's own are."""
    layout = layout_of(TYPES[kind](sizes=[11, 7, 0, 2]), ModelSizes(**MHA), tuple(range(7)))
    constant = 7 * of_model(24, 40, 5, 6)
    assert layout.levels == [1, 2, 4]
    assert [layout.record_numel(level) for level in layout.levels] == [11 * constant, 7 * constant, 2 * constant]
    assert layout.fetched == 20 * constant
    assert layout.bank == (11 * 16 + 7 * 16**2 + 2 * 16**4) * constant
    assert [layout.num_records(level) for level in layout.levels] == [17, 257, 65537]


def of_paper(sizes, hidden, layers):
    model = ModelSizes(hidden_size=hidden, num_heads=4, intermediate_size=4 * hidden, num_layers=layers)
    layout = layout_of(HierFFNOptions(sizes=sizes), model, tuple(range(layers)))
    return layout.fetched, layout.bank


@pytest.mark.parametrize(
    ("sizes", "hidden", "layers", "fetched", "bank"),
    [
        ([256, 64, 16, 0], 512, 35, 18.06e6, 4.62e9),  # OpenLM-160M, tables 1 and 7
        ([512, 128, 32, 0], 1024, 24, 49.5e6, 12.68e9),  # OpenLM-410M, table 1
        ([768, 256, 16, 0], 2048, 24, 153.4e6, 21.14e9),  # OpenLM-1B, table 1
        ([512, 128, 32, 0], 640, 18, 23.22e6, 5.945e9),  # Gemma 3 270M, table 2
        ([512, 128, 32, 0], 896, 24, 43.35e6, 11.10e9),  # Qwen 2.5 0.5B, table 2
        ([768, 256, 16, 0], 2048, 16, 102.2e6, 14.09e9),  # Llama 3.2 1B, table 2
        ([0, 16, 4, 1], 512, 35, 1.13e6, 4.62e9),  # table 7
        ([5376, 0, 0, 0], 512, 35, 289e6, 4.62e9),
        ([4096, 320, 17, 2], 512, 35, 238.4e6, 18.7e9),
    ],
)
def test_sizes_are_those_of_the_tables(sizes, hidden, layers, fetched, bank):
    assert of_paper(sizes, hidden, layers) == (pytest.approx(fetched, rel=2e-3), pytest.approx(bank, rel=5e-3))


@pytest.mark.parametrize(
    ("sizes", "layers", "fetched", "bank"),
    [
        ([3840, 336, 6, 0], 12, 154_165_248, 6_341_787_648),
        ([1445, 256, 8, 0], 17, 89_250_816, 6_341_246_976),
        ([870, 226, 9, 0], 19, 64_496_640, 6_341_099_520),
        ([384, 200, 10, 0], 21, 38_320_128, 6_341_787_648),
        ([264, 94, 16, 0], 22, 25_276_416, 6_341_001_216),
    ],
    ids=["260M", "320M", "350M", "370M", "385M"],
)
def test_sizes_are_exactly_those_of_table_8(sizes, layers, fetched, bank):
    assert of_paper(sizes, 1024, layers) == (fetched, bank)


def test_a_block_of_appendix_d_has_860160_parameters():
    model = ModelSizes(hidden_size=512, num_heads=12, head_dim=32, intermediate_size=2048, num_layers=35)
    layout = layout_of(HierFFNOptions(sizes=[0, 0, 16, 0]), model, tuple(range(35)))
    assert layout.levels == [3] and layout.fetched == layout.record_numel(3) == 860_160
    assert layout.bank == 4096 * 860_160 and layout.blocks.nodes(3) == 4096
