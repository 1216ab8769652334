"""What heads that read the depth compute, by hooks on the family's model and one softmax."""

import torch
from torch.nn.functional import linear
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAME = "depth_by_hand"


def add_depth(native, model):
    """Make the family's model compute what one with the memory does; return copies of its tensors."""
    (entry,) = model.config.memories().attached.values()
    of_memory = {name: value for name, value in model.named_parameters() if ".memories." in name}
    owned = {name: value.detach().clone().requires_grad_() for name, value in of_memory.items()}
    depth = _Depth(entry, owned, native.config)
    for index, layer in enumerate(native.model.layers):
        layer.self_attn.depth, layer.self_attn.place = depth, index
        layer.self_attn.register_forward_pre_hook(_before_attention, with_kwargs=True)
        layer.mlp.register_forward_pre_hook(lambda _, read, of=layer.self_attn: depth.write(of, read[0]))
    native.set_attn_implementation(_NAME)
    return owned


class _Depth:
    """The slots of a pass, `[B, T, K, d]`, with keys that are normalised and not rotated."""

    def __init__(self, entry, owned, config):
        self.options, self.layers, self.name, self.owned = entry.options, entry.layers, entry.name, owned
        kinds = {config.layer_types[layer] for layer in entry.layers} if config.model_type == "gemma3_text" else {0}
        self.rotations_differ = len(kinds) > 1

    def begin(self):
        self.slots = []

    def tensor(self, layer, name):
        return self.owned.get(f"model.layers.{layer}.memories.{self.name}.{name}")

    def write(self, attention, mlp_input):
        """Attention's slot first, then the feed-forward network's."""
        position, options = attention.place, self.options
        if position not in self.layers or position == self.layers[-1]:
            return
        written, parts = [], ("key", "value")
        if options.attention_slots == "reused":
            written.append((attention.raw_key, attention.v_proj(attention.read)))
        elif options.attention_slots == "projected":
            written.append([self._projected(position, f"attention_{part}", attention.read) for part in parts])
        if options.ffn_slots:
            written.append([self._projected(position, f"ffn_{part}", mlp_input) for part in parts])
        for key, value in written:
            slot = _normalised(getattr(attention, "k_norm", None), key), value
            self.slots.append([part.unflatten(-1, (-1, attention.head_dim)) for part in slot])

    def _projected(self, position, name, read):
        return linear(read, self.tensor(position, f"{name}.weight"), self.tensor(position, f"{name}_bias"))

    def gate(self, position):
        """c, `[H, 1, 1]`."""
        gate = self.tensor(position, "depth_gate")
        return 1.0 if gate is None else gate[:, None, None]


def _normalised(norm, heads):
    """`[..., K * d]`: by each head, or all of them together, as the norm is wide."""
    if norm is None:
        return heads
    return norm(heads.unflatten(-1, (-1, norm.weight.numel()))).flatten(-2)


def _before_attention(attention, _, arguments):
    depth = attention.depth
    if attention.place == 0:
        depth.begin()
    read = arguments["hidden_states"]
    attention.read, attention.raw_key = read, attention.k_proj(read)
    query = _normalised(getattr(attention, "q_norm", None), attention.q_proj(read))
    query = query.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)  # [B, H, T, d]
    cos, sin = (part.unsqueeze(1) for part in arguments["position_embeddings"])
    attention.turned_twice = query if depth.rotations_differ else query * (cos**2 + sin**2)


def _attend(attention, query, key, value, mask, *, scaling, sliding_window=None, softcap=None, **_):
    assert mask is None, "texts are not padded"
    depth, group = attention.depth, query.shape[1] // key.shape[1]

    def masses(equation, queries, keys):
        scores = torch.einsum(equation, queries, keys) * scaling
        return (scores if softcap is None else softcap * torch.tanh(scores / softcap)).exp()

    # Query head h reads key/value head h // G.
    of_head = torch.arange(query.shape[1]) // group
    behind = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
    seen = (behind >= 0) if sliding_window is None else (behind >= 0) & (behind < sliding_window)
    mass = masses("bhtd,bhsd->bhts", query, key[:, of_head]) * seen
    total, read = mass.sum(-1), torch.einsum("bhts,bhsd->bhtd", mass, value[:, of_head])
    if attention.place in depth.layers and depth.slots:
        keys, values = (torch.stack(part, dim=2)[:, :, :, of_head] for part in zip(*depth.slots, strict=True))
        mass = masses("bhtd,btnhd->bhtn", attention.turned_twice, keys)
        gate, alone = depth.gate(attention.place), read / total.unsqueeze(-1)
        of_depth, divisor = torch.einsum("bhtn,btnhd->bhtd", mass, values), (total + mass.sum(-1)).unsqueeze(-1)
        both, start, closed = (read + of_depth) / divisor, alone, 0.0
        if depth.options.joining == "added":
            start, closed = alone + of_depth / mass.sum(-1, keepdim=True), mass / mass.sum(-1, keepdim=True)
        # What the value of each slot is multiplied with, `[B, H, T, n]`, and those of the sequence together, `[B, H, T]`.
        attention.slot_shares = (1 - gate) * closed + gate * mass / divisor
        attention.sequence_share = ((1 - gate) + gate * total.unsqueeze(-1) / divisor).squeeze(-1)
        return ((1 - gate) * start + gate * both).transpose(1, 2), None
    return (read / total.unsqueeze(-1)).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
