"""Models with UltraMemV2 attached, built in memory from a tiny base."""

import torch
from tiny import NUM_LAYERS, tiny_model

from midus_hf.models import FAMILIES

KINDS = {
    "own": {},
    "ring": {"share": "ring:2"},
    "expanded": {"key_pairs": 2, "projections": "per-block", "heads": 2},
    "skip": {"site": "skip", "into": [2, 3]},
    "memory-plus": {"scoring": "sum", "weights": "softmax", "rank": 1, "output_gate": True, "pre_value_width": 0},
}


def ultramem_model(family="llama", kind="own", dtype=torch.float64, num_hidden_layers=NUM_LAYERS, **options):
    """A tiny model with a memory that acts, in eval mode."""
    entry = {"type": "ultramem", "layers": [1, 3], "n": 8, "k": 3, "zero": "none", **KINDS[kind], **options}
    if kind == "skip":
        entry["layers"] = [1, 2]
    native = tiny_model(family, dtype, num_hidden_layers=num_hidden_layers)
    fields = {
        key: value for key, value in native.config.to_dict().items() if key not in ("model_type", "architectures")
    }
    torch.manual_seed(0)
    model_class = FAMILIES[native.config.model_type]
    model = model_class(model_class.config_class(**fields, memory=[entry])).to(dtype)
    model.load_state_dict(native.state_dict(), strict=False)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("value_table"):
                value.mul_(4)  # so that it shows
    return model.eval()


@torch.no_grad()
def logits(model, tokens, **given):
    return model(tokens, use_cache=False, **given).logits
