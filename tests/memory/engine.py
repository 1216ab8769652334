"""Stands for vLLM in tests where it is not installed: its config, and passes over parts of requests whose keys lie in blocks."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

BLOCK = 4


class Engine:
    """What memories read of vLLM, with a cache of 16 blocks of 4 tokens, 2 heads of size 8."""

    def __init__(self, monkeypatch: Any):
        self.config = SimpleNamespace(
            kv_transfer_config=None,
            speculative_config=None,
            lora_config=None,
            parallel_config=SimpleNamespace(use_ubatching=False),
            model_config=SimpleNamespace(enable_prompt_embeds=False),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            compilation_config=SimpleNamespace(cudagraph_mode=None),
        )
        self.attention = Attention()
        self.context = SimpleNamespace(
            no_compile_layers={"first": self.attention}, attn_metadata=None, slot_mapping={}
        )
        of_config, of_context = ModuleType("vllm.config"), ModuleType("vllm.forward_context")
        of_config.get_current_vllm_config = lambda: self.config
        of_context.get_forward_context = lambda: self.context
        for module in (ModuleType("vllm"), of_config, of_context):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def begin(self, parts: list[tuple[list[int], int, int]], padding: int = 0) -> None:
        """Begin a pass over parts of requests, each the request's blocks and its first and last position there."""
        longest = max(len(blocks) for blocks, _, _ in parts)
        mapping = [
            blocks[position // BLOCK] * BLOCK + position % BLOCK
            for blocks, first, end in parts
            for position in range(first, end)
        ]
        metadata = SimpleNamespace(
            block_table=torch.tensor(
                [blocks + [0] * (longest - len(blocks)) for blocks, _, _ in parts], dtype=torch.int32
            ),
            query_start_loc=torch.tensor([0, *(end - first for _, first, end in parts)]).cumsum(0).int(),
            seq_lens=torch.tensor([end for _, _, end in parts], dtype=torch.int32),
        )
        self.context.attn_metadata = {"first": metadata}
        self.context.slot_mapping = {"first": torch.tensor(mapping + [-1] * padding)}


class Attention:
    """vLLM's attention of a layer."""

    layer_name, sliding_window = "first", None

    def __init__(self) -> None:
        self.kv_cache = torch.zeros(16, 2, BLOCK, 16)
        self.attn_backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
