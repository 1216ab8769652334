"""Tiny models with chapters whose routers choose by the kind of each token, so that what is read is known."""

from typing import Any

import torch
from models.hosting import host_config
from tiny import FAMILIES as TINY_FAMILIES
from transformers import PreTrainedModel

from midus_hf.evaluation.text_rows import TextRows
from midus_hf.models import FAMILIES

CHAPTERS, SHARED, TOKENS, LAYERS = 6, 1, 4, [0, 2]
# Of the router for a token of kind a; for one of kind b they are the negative of it.
LOGITS = torch.tensor([0.0, 8, 7, 0, -7, -8])
# First element of the residual stream: so much above all others that it is limited to 1 where it is routed by.
_LARGE = 100.0
# Chapters that a token of each kind reads, the shared one included: nobody reads chapter 3.
READ = {"a": [0, 1, 2], "b": [0, 4, 5]}


def routed_model(family: str = "llama", **options: Any) -> PreTrainedModel:
    """A model whose residual stream says in its first element of what kind a token is: nothing else is added there."""
    config = TINY_FAMILIES[family].config()
    sizes = {"memory_tokens": CHAPTERS * TOKENS, "chapters": CHAPTERS, "k": 2, "routing": "token"}
    entry = {"type": "chapters", **sizes, "layers": LAYERS, **options}
    torch.manual_seed(0)
    model = FAMILIES[config.model_type](host_config(config, [entry]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "memor" in name:
                parameter.copy_(torch.randn_like(parameter))
        embedding = model.get_input_embeddings()
        kinds = _LARGE * torch.where(torch.arange(config.vocab_size) < 64, 1.0, -1.0)
        embedding.weight[:, 0] = kinds / getattr(embedding, "embed_scale", torch.ones(()))
        for layer, block in enumerate(model.model.layers):
            block.self_attn.o_proj.weight[0] = 0
            block.mlp.down_proj.weight[0] = 0
            if layer in LAYERS:
                memory = block.memories["chapters"]
                memory.output_projection.weight[0] = 0
                memory.router_weight.zero_()
                memory.router_weight[:, 0] = LOGITS
                memory.router_bias.zero_()
    return model.eval()


def rows_of(kinds: str, lengths: tuple[int, ...] = (12, 12, 7), name: str | None = None) -> TextRows:
    """A text whose tokens are of these kinds in turn, such as `"ab"`, a document per row."""
    generator = torch.Generator().manual_seed(len(kinds))
    rows = []
    for length in lengths:
        ids = torch.randint(3, 64, (length,), generator=generator)
        is_b = torch.tensor([kinds[index % len(kinds)] == "b" for index in range(length)])
        rows.append(ids + 64 * is_b)
    return TextRows(name or kinds, rows, list(range(len(rows))))
