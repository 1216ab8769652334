"""Packs in a model: the service that finds what the tokens of a pass read, and attention to packs."""

from typing import Any

import torch
from transformers import PreTrainedConfig

from midus_hf.memories.hosting.heads import (
    Attention,
    AttentionFunction,
    HeadsOutput,
    SequenceHeads,
    get_attention_host,
    require_log_sum_exp,
)
from midus_hf.memories.hosting.layer import HostLayer
from midus_hf.memories.hosting.parts import CACHE, Keywords, arguments_of_pass
from midus_hf.memories.hosting.service import Hosted, HostStack, Service, States, Tokens
from midus_hf.memories.hosting.sites import InsideAttention
from midus_hf.memories.hosting.state import MemoryState, without_last
from midus_hf.memories.module import MemoryModule
from midus_hf.memories.packs.glossary_files import GlossaryFiles
from midus_hf.memories.packs.opening import PADDING_TOKEN, Openings
from midus_hf.memories.packs.options import PacksOptions
from midus_hf.memories.packs.placing import OpenPacks
from midus_hf.memories.packs.reading import RECORDING, Recording
from midus_hf.memories.packs.store import KeptPacks, PackStore
from midus_hf.memories.registry import Memories, register_layer
from midus_hf.ops.moda.op import joint_attention, sequence_scores, shares_of_both


class PacksService(Service):
    """Packs that the tokens of a pass read, as `packs`, an `OpenPacks`; not given if no token reads one.

    The first layer with the memory has a state in the cache, for `Openings` and `KeptPacks`. A pass without a cache computes the
    packs that it reads.
    """

    key = "packs"
    is_required = True
    may_add_cache = True

    def __init__(self, model: HostStack, memories: Memories, hosted: Hosted):
        self.files = model.services[GlossaryFiles.key]
        self.store = PackStore(model, hosted)
        first = self.store.name, self.store.layers[0]
        self.tokens = Tokens(model, memories, hosted)
        self.states = States(model, memories, {first: hosted[first]})

    def prepare_pass(self, model: HostStack, arguments: Keywords, own: Keywords) -> Any:
        """Return the packs that tokens read, by the name of the memory; nothing if no token reads any."""
        if own.get(RECORDING) is not None:
            return {self.store.name: own[RECORDING]}
        is_skipped = all(self.store.name not in model.layers[layer].sites for layer in self.store.layers)
        if self.files.glossary is None or is_skipped:
            return {}
        ids = arguments_of_pass({"input_ids"}, arguments, own)["input_ids"]
        places = self.tokens.prepare_pass(model, arguments, own)
        state = next(iter(self.states.prepare_pass(model, arguments, own).values()), None)
        positions, cache = arguments["position_ids"], arguments[CACHE]
        if positions is None:
            first = 0 if cache is None else int(cache.get_seq_length())
            positions = torch.arange(first, first + ids.shape[1])
        elif positions.dim() == 3:  # along the axes of images, which are one at text
            positions = positions[0]
        opened = self._open(model, ids, positions.expand(ids.shape), places.real, places.starts, state)
        return {} if opened is None else {self.store.name: opened}

    @torch.compiler.disable
    def _open(
        self,
        model: HostStack,
        ids: torch.Tensor,
        positions: torch.Tensor,
        real: torch.Tensor | None,
        starts: torch.Tensor | None,
        state: MemoryState | None,
    ) -> OpenPacks | None:
        """Return the packs that the tokens of a pass read, or None if no token reads one."""
        glossary = self.files.glossary
        tokens = ids.detach().to("cpu", torch.int64)
        if real is not None:
            tokens = torch.where(real.cpu(), tokens, PADDING_TOKEN)
        openings = Openings(glossary, self.store.options, state)
        rows = openings.read(tokens, positions.tolist(), None if starts is None else starts.cpu())
        kept = KeptPacks() if state is None else state.shared.setdefault("packs", KeptPacks())
        with torch.inference_mode(False), torch.no_grad():
            return self.store.open(model, model, glossary, rows, ids, kept) if any(rows) else None

    @classmethod
    def layer_arguments(cls, value: Any, name: str, layer: int) -> Keywords:
        return {"packs": value[name]}

    def prepare_inputs(self, inputs: Keywords, attention_mask: object) -> None:
        """Add a mask of padding, since static caches get a mask of another form."""
        self.tokens.prepare_inputs(inputs, attention_mask)

    def check_continuous_batching(self, arguments: Keywords) -> None:
        """Refuse continuous batching, whose cache has no place for states."""
        self.states.check_continuous_batching(arguments)


class PacksSite(InsideAttention):
    """Heads that also read packs. Other memories change their output for the sequence and the packs."""

    def __init__(self, layer: HostLayer, config: PreTrainedConfig, memories: Memories):
        super().__init__(layer, config, memories)
        self.memory = next(entry.name for entry in memories.attached_to(layer.layer_idx) if entry.options.attends)
        get_attention_host(layer).changes.insert(0, self)

    def attend(
        self, attention_function: AttentionFunction, module: Attention, *heads: Any, **kwargs: object
    ) -> HeadsOutput:
        """Attend to the sequence, and to the packs that tokens of the pass read, if there are any."""
        layer, call = self.layer, self.layer.call
        if not call.memory_inputs.is_complete_for(layer.classes[self.memory], self.memory):
            return attention_function(module, *heads, **kwargs)
        query, key, value, mask = heads
        inputs = layer.inputs_of(self.memory, call.memory_inputs)
        if isinstance(inputs["packs"], Recording):  # also where the layer skips the memory
            inputs["packs"].note(layer.memories[self.memory].index, module, key, value, call.rotation)  # type: ignore[arg-type]
            return attention_function(module, *heads, **kwargs)
        if self.memory not in layer.sites:
            return attention_function(module, *heads, **kwargs)
        implementation = module.config.config._attn_implementation
        sequence = SequenceHeads(module, attention_function, implementation, query, key, value, mask, kwargs)
        return layer.memories[self.memory](sequence=sequence, **inputs)


@register_layer(PacksOptions)
class PacksMemory(MemoryModule):
    """A layer's part of packs, without tensors: reads keys and values of texts whose names are open.

    A pack ends `distance` positions before the last token of its name. Its scores are raised by `score_bias`, in a chat by
    `chat_score_bias`; at 0, a token reads the same as if the pack's text were there.
    """

    sites = (PacksSite,)
    services = (GlossaryFiles, PacksService)
    options: PacksOptions
    rollback = staticmethod(without_last)

    @classmethod
    def check_attention(cls, implementation: str | None) -> None:
        """Refuse an implementation that does not return the log-sum-exp of its softmax."""
        require_log_sum_exp(implementation)

    def forward(self, *, sequence: SequenceHeads, packs: OpenPacks) -> HeadsOutput:
        """Attend to the sequence and to the packs of each token, in one softmax.

        Return the output of the heads, `[B, T, H, d]`, bit for bit that of the sequence where a token reads no pack; and attention
        weights to the sequence, if known, which sum to less than 1 where a token reads one.
        """
        if packs.is_whole and sequence.query.shape[2] == 1 and sequence.mask is None:  # a step of a generation
            (part,) = packs.parts
            keys, values = packs.of(self.index, part, sequence.module)
            return sequence.attend_with_extra_keys(keys, values, part.bias)
        output, weights, lse = sequence.with_log_sum()
        sequence_output = output.transpose(1, 2)  # [B, H, T, d]
        pieces, done, shares_of_sequence = [], 0, torch.ones_like(lse)
        for part in packs.parts:
            keys, values = packs.of(self.index, part, sequence.module)
            query = sequence.query[:, :, part.tokens]
            # [B, H, T', S]
            scores = sequence_scores(
                query, keys, part.reads.unsqueeze(1), False, sequence.scaling, sequence.applied_softcap
            )
            if part.bias is not None:
                scores = scores + part.bias[:, None]
            is_empty = ~part.reads.any(-1)[:, None]  # [B, 1, T']
            scores = scores.masked_fill(is_empty.unsqueeze(-1), 0)
            shares = scores.softmax(-1).unflatten(1, (keys.shape[1], -1)).flatten(2, 3)  # [B, K, G * T', S]
            read = shares @ values.to(shares.dtype)  # [B, K, G * T', d]
            read = read.unflatten(2, (-1, scores.shape[2])).flatten(1, 2)  # [B, H, T', d]
            read_lse = scores.logsumexp(-1).masked_fill(is_empty, float("-inf"))
            tokens = part.tokens
            if weights is not None:
                shares_of_sequence[:, :, tokens] = shares_of_both(lse[:, :, tokens], read_lse)[1]
            pieces.append(sequence_output[:, :, done : tokens.start])
            pieces.append(joint_attention(sequence_output[:, :, tokens], lse[:, :, tokens], read, read_lse))
            done = tokens.stop
        if weights is not None:
            weights = weights * shares_of_sequence.unsqueeze(-1).to(weights.dtype)
        joined = torch.cat([*pieces, sequence_output[:, :, done:]], dim=2).transpose(1, 2)
        return torch.where(packs.is_open[:, :, None, None], joined, output), weights
