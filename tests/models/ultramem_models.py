"""Models with UltraMemV2 attached, built in memory from a tiny base."""

import torch
from models.hosting import host_of
from tiny import NUM_LAYERS, tiny_model

KINDS = {
    "own": {},
    "heads": {"heads": 2},
    "ring": {"share": "ring:2"},
    "skip": {"site": "skip", "layers": [1, 2], "into": [2, 3]},
    "shared skip": {"site": "skip", "layers": [1, 2], "into": [1, 2], "share": "ring:2"},
}


def ultramem_model(family="llama", kind="own", dtype=torch.float64, num_hidden_layers=NUM_LAYERS, **options):
    """A tiny model with a memory that acts, in eval mode."""
    entry = {"type": "ultramem-v2", "layers": [1, 3], "n": 8, "k": 3, "zero": "none", **KINDS[kind], **options}
    native = tiny_model(family, dtype, num_hidden_layers=num_hidden_layers)
    model = host_of(native, entry)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("value_table"):
                value.mul_(4)  # so that it shows
    return model
