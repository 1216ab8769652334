"""FLOPs of an n-gram memory, and the values that a token reads."""

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.engram.options import EngramOptions
from midus_hf.memories.flops import ACTIVATIONS, SIGMOID, flops_of, linear, rms_norm, values_read_of


@values_read_of(EngramOptions)
def engram_values_read(options: EngramOptions, sizes: ModelSizes) -> int:
    return options.num_read * options.row_width


@flops_of(EngramOptions)
def engram_flops(
    options: EngramOptions, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int
) -> dict[str, int]:
    """Count the operations as `flops` does. Addresses are integers and do not count."""
    rows, hidden = batch * tokens, sizes.hidden_size
    taps = rows * hidden * (2 * options.kernel + ACTIVATIONS["silu"]) + rms_norm(rows, hidden)
    return {
        "projections": 2 * linear(rows, options.num_read * options.row_width, hidden),
        "gate": 2 * rms_norm(rows, hidden) + linear(rows, hidden, 1) + rows * (SIGMOID + hidden),
        "convolution": taps + rows * hidden if options.kernel else 0,
        "residual adds": rows * hidden,
    }
