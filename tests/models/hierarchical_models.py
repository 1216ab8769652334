"""Models whose memories fetch blocks, built in memory from a tiny base, and what they compute by hooks on the base itself."""

from typing import Any

import torch
from models.hosting import host_of
from tiny import tiny_model

from midus_hf.banks.memory_bank import MemoryBank, create_bank
from midus_hf.config.fetched_blocks import BANKS_FOLDER

KINDS = ("hier-ffn", "hier-lora-qk", "hier-lora-vo", "hier-lora-ffn", "hier-kv")
# Paths of two rows in the tree of these models, three children a node; the second reads the generic memory.
IDS = torch.tensor([[1, 4, 13], [-1, -1, -1]])

OTHER_IDS = torch.tensor([[1, 3, 10], [1, 3, 9]])
# Settings of a generation without chance.
FOUR_TOKENS = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
_PROJECTIONS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output_projection": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def entry_of(kind, **changes):
    return {"type": kind, "layers": [0, 2, 3], "sizes": [3, 0, 2], "branching": 3, **changes}


def hierarchical_model(family, kind, folder, dtype=torch.float64, *, acting=True, base=None, **options) -> Any:
    """A tiny model with the bank of one memory, or of several kinds, whose blocks act, in eval mode.

    Args:
        family: A key of `tiny.NATIVE_FAMILIES`.
        kind: Of the memory, or several.
        folder: To make banks in.
        dtype: Of model and bank.
        acting: Whether every block was written; else none was.
        base: Fields of the base's config that differ from the table's.
        options: Of the memory.
    """
    kinds = (kind,) if isinstance(kind, str) else kind
    model = host_of(tiny_model(family, dtype, **(base or {})), *(entry_of(name, **options) for name in kinds))
    for name, layout in model.config.memories().banks.items():
        path = folder / BANKS_FOLDER / name
        create_bank(path, layout, dtype, seed=3)
        if acting:
            bank = MemoryBank(path, layout, writable=True)
            fill(bank)
            bank.close()
    model.open_banks(folder)
    return model


def fill(bank, but=()):
    """Write every block but some, so that it acts."""
    generator = torch.Generator().manual_seed(8)
    for level in bank.layout.levels:
        for index in range(bank.layout.num_records(level)):
            if (level, index) not in but:
                bank.write(level, index, 0.3 * torch.randn(bank.layout.record_numel(level), generator=generator))


def blocks_of_rows(model, name, ids):
    """For each layer and row, the tensors of each level by name, cut out of records by hand."""
    bank, layout = model.banks.of(name), model.config.memories().banks[name]
    entry = model.config.memories().attached[name]
    found: dict[int, list[list[dict[str, torch.Tensor]]]] = {layer: [] for layer in entry.layers}
    for path in ids.tolist():
        for layer in entry.layers:
            found[layer].append([])
        for level, tensors in enumerate(layout.blocks.levels, 1):
            if not tensors:
                continue
            node = 3**level if path[0] == -1 else path[level - 1]
            record, start = bank.block(level, node).to(model.dtype), 0
            for layer in entry.layers:
                of_layer = {}
                for tensor_name, tensor in tensors.items():
                    size = torch.Size(tensor.shape).numel()
                    of_layer[tensor_name] = record[start : start + size].view(tensor.shape)
                    start += size
                found[layer][-1].append(of_layer)
            assert start == len(record)
    return found


def add_reference(native, model, ids):
    """Make the base compute what memories make of it for rows with these paths: nothing of the code that hosts them runs.

    Returns:
        Handles of the hooks.
    """
    handles = []
    for name, entry in model.config.memories().attached.items():
        for layer, rows in blocks_of_rows(model, name, ids).items():
            module = native.model.layers[layer]
            if entry.type == "hier-ffn":
                handles.append(module.mlp.register_forward_hook(_wider(rows)))
            elif entry.type == "hier-kv":
                handles += _attending(module.self_attn, rows)
            else:
                for role, path in _PROJECTIONS.items():
                    if f"{role}_up" in rows[0][0]:
                        hook = _patched(rows, role, entry.options.alpha)
                        handles.append(module.get_submodule(path).register_forward_hook(hook))
    return handles


def _wider(rows):
    def hook(mlp, arguments, output):
        added = []
        for read, levels in zip(arguments[0], rows, strict=True):
            units = [mlp.act_fn(read @ block["gate"].T) * (read @ block["up"].T) @ block["down"].T for block in levels]
            added.append(sum(units))
        return output + torch.stack(added)

    return hook


def _patched(rows, role, alpha):
    def hook(projection, arguments, output):
        patches = [sum(block[f"{role}_up"] @ block[f"{role}_down"] for block in levels) for levels in rows]
        return output + alpha * torch.stack(
            [read @ patch.T for read, patch in zip(arguments[0], patches, strict=True)]
        )

    return hook


def _attending(attention, rows):
    """Queries by hand from what attention reads: never rotated, but normalised where the family does that."""
    seen = {}

    def see(module, arguments, keywords):
        read = keywords["hidden_states"] if "hidden_states" in keywords else arguments[0]
        query = module.q_proj(read)
        norm = getattr(module, "q_norm", None)
        over_heads = norm is not None and norm.weight.numel() == query.shape[-1]
        query = norm(query) if over_heads else query
        query = query.view(*read.shape[:2], -1, module.head_dim)
        seen["query"] = query if norm is None or over_heads else norm(query)

    def add(projection, arguments):
        added = []
        for query, levels in zip(seen["query"], rows, strict=True):  # [T, H, d]
            keys = torch.cat([block["memory_keys"] for block in levels])
            values = torch.cat([block["memory_values"] for block in levels])
            repeats = query.shape[1] // keys.shape[1]
            keys, values = (part.repeat_interleave(repeats, dim=1) for part in (keys, values))
            scores = torch.einsum("thd,rhd->thr", query, keys) * attention.scaling
            cap = getattr(attention, "attn_logit_softcapping", None)
            scores = scores if cap is None else cap * torch.tanh(scores / cap)
            added.append(torch.einsum("thr,rhd->thd", scores.softmax(-1), values).flatten(1))
        return (arguments[0] + torch.stack(added),)

    return [
        attention.register_forward_pre_hook(see, with_kwargs=True),
        attention.o_proj.register_forward_pre_hook(add),
    ]
