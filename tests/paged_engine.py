"""Stands for vLLM where it is not installed: config, passes over parts, attention to a cache."""

import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

BLOCK = 4
BLOCKS = 50


class Engine:
    """What memories read of vLLM, with a cache of 50 blocks of 4 tokens."""

    def __init__(self, monkeypatch: Any):
        self.config = SimpleNamespace(
            **dict.fromkeys(("kv_transfer_config", "speculative_config", "lora_config")),
            parallel_config=SimpleNamespace(use_ubatching=False),
            model_config=SimpleNamespace(enable_prompt_embeds=False),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            compilation_config=SimpleNamespace(cudagraph_mode=None),
        )
        self.layers = {"first": Attention("first")}
        told = {"attn_metadata": None, "slot_mapping": {}, "additional_kwargs": {}}
        self.context = SimpleNamespace(no_compile_layers=self.layers, **told)
        of_config, of_context = ModuleType("vllm.config"), ModuleType("vllm.forward_context")
        of_config.get_current_vllm_config = lambda: self.config
        of_context.get_forward_context = lambda: self.context
        for module in (ModuleType("vllm"), of_config, of_context):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "vllm", self.attend)

    def serve(self, stack: Any) -> None:
        self.layers.clear()
        config = stack.config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = (config.num_key_value_heads, width)
        types = getattr(config, "layer_types", None) or ["full_attention"] * len(stack.layers)
        for number, (layer, kind) in enumerate(zip(stack.layers, types, strict=True)):
            window = config.sliding_window if kind == "sliding_attention" else None
            name = f"layers.{number}"
            self.layers[name] = layer.self_attn.attn = Attention(name, *heads, layer.self_attn.scaling, window)

    def begin(self, parts: list[tuple[list[int], int, int]], padding: int = 0) -> None:
        """Begin a pass over parts of requests, each its blocks and its first and last position."""
        longest = max(len(blocks) for blocks, _, _ in parts)
        starts = torch.tensor([0, *(end - first for _, first, end in parts)]).cumsum(0).int()
        lengths = torch.tensor([end for _, _, end in parts], dtype=torch.int32)
        self.context.attn_metadata, self.context.additional_kwargs = {}, {}
        for name, attention in self.layers.items():
            table = torch.tensor([[*blocks, *[0] * (longest - len(blocks))] for blocks, _, _ in parts])
            if attention.sliding_window is not None:  # which have blocks of their own
                table = BLOCKS - 1 - table
            mapping = [
                int(table[number, position // BLOCK]) * BLOCK + position % BLOCK
                for number, (_, first, end) in enumerate(parts)
                for position in range(first, end)
            ]
            metadata = {"block_table": table.int(), "query_start_loc": starts, "seq_lens": lengths}
            self.context.attn_metadata[name] = SimpleNamespace(**metadata)
            self.context.slot_mapping[name] = torch.tensor(mapping + [-1] * padding)

    def attend(self, module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> tuple[torch.Tensor, None]:
        """Write keys and values `[1, K, T, d]` of a pass into the cache, and attend to it."""
        attention = module.attn
        slots = self.context.slot_mapping[attention.layer_name]
        metadata = self.context.attn_metadata[attention.layer_name]
        attention.write(attention, key[0].transpose(0, 1), value[0].transpose(0, 1), attention.kv_cache, slots)
        keys, values = attention.contents()  # [slots, K, d]
        outputs = []
        for request, (first, end) in enumerate(itertools.pairwise(metadata.query_start_loc)):
            length = int(metadata.seq_lens[request])
            for token in range(first, end):
                position = length - int(end) + token
                window = attention.sliding_window or position + 1
                read = torch.arange(max(0, position + 1 - window), position + 1)
                at = metadata.block_table[request, read // BLOCK] * BLOCK + read % BLOCK
                heads = query[0, :, token].unflatten(0, (keys.shape[1], -1))  # [K, G, d]
                shares = (torch.einsum("kgd,skd->kgs", heads, keys[at]) * attention.impl.scale).softmax(-1)
                outputs.append(torch.einsum("kgs,skd->kgd", shares, values[at]).flatten())
        return torch.stack(outputs), None


class Attention:
    """vLLM's attention of a layer, with blocks as on CPUs: keys as `[d, N]`, and values as `[N, d]`."""

    has_sink = False

    def __init__(self, name: str, heads: int = 2, width: int = 8, scale: float = 1.0, sliding_window: Any = None):
        self.layer_name, self.sliding_window = name, sliding_window
        self.kv_cache = torch.zeros(BLOCKS, heads, BLOCK, 2 * width)
        self.attn_backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
        self.impl = SimpleNamespace(scale=scale, do_kv_cache_update=self.write)

    @staticmethod
    def write(attention: Any, key: Any, value: Any, cache: torch.Tensor, slots: torch.Tensor) -> None:
        halves = cache.view(*cache.shape[:2], 2, -1)
        for token, slot in enumerate(slots.tolist()):
            block, at = divmod(slot, BLOCK)
            halves[block, :, 0].unflatten(-1, (-1, BLOCK))[..., at] = key[token]
            halves[block, :, 1].unflatten(-1, (BLOCK, -1))[:, at] = value[token]

    def contents(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.kv_cache.view(*self.kv_cache.shape[:2], 2, -1).unbind(2)
        return (
            keys.unflatten(-1, (-1, BLOCK)).permute(0, 3, 1, 2).flatten(0, 1),
            values.unflatten(-1, (BLOCK, -1)).permute(0, 2, 1, 3).flatten(0, 1),
        )
