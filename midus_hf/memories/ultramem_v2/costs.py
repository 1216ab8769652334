"""FLOPs of UltraMemV2, and the values that a token reads."""

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.flops import flops_of, linear, rms_norm, top_k, values_read_of
from midus_hf.memories.ultramem_v2.options import UltraMemV2Options


@values_read_of(UltraMemV2Options)
def ultramem_v2_values_read(options: UltraMemV2Options, sizes: ModelSizes) -> int:
    widths = options.width("value_width", sizes) + options.width("pre_value_width", sizes)
    return options.heads * options.k * widths


@flops_of(UltraMemV2Options)
def ultramem_v2_flops(
    options: UltraMemV2Options, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int
) -> dict[str, int]:
    """Count the operations; keys are normalised once per pass, and singular vectors of cores do not count."""
    rows, hidden, key_width = batch * tokens, sizes.hidden_size, options.width("key_width", sizes)
    value_width, pre_width = options.width("value_width", sizes), options.width("pre_value_width", sizes)
    queries, vectors, slots = rows * options.heads, options.heads * options.rank, rows * options.heads * options.k
    grid = options.side**2
    first = 2 * top_k(queries, options.keys, options.side) + 4 * queries * options.rank * options.keys
    second = queries * (2 * options.side * options.rank**2 + 2 * grid * options.rank)
    return {
        "queries": linear(rows, hidden, 2 * vectors * key_width)
        + rms_norm(2 * vectors * (rows + options.keys), key_width),
        "scores": 2 * linear(rows * vectors, key_width, options.keys),
        "choice": first + second + top_k(queries, grid, options.k),
        "pre-values": (linear(rows, hidden, pre_width) + slots * (2 * pre_width + 1)) if pre_width else 0,
        "values": 2 * slots * value_width,
        "output projection": linear(rows, value_width, hidden),
        "residual adds": rows * hidden,
    }
