"""Mixin for a family's language model over a stack that hosts memory."""

import warnings
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Cache
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.auto import modeling_auto

from midus_hf.config.installed import INSTALLED, needed_for
from midus_hf.memory.kept_values import kept_values
from midus_hf.memory.memory_state import check_taking_back, refuse_one_row
from midus_hf.models.adapter_layers import refuse_adapter_of_base
from midus_hf.models.fetching import BLOCKS, IDS
from midus_hf.models.host import HostsMemory
from midus_hf.models.listing import list_model
from midus_hf.models.parts import CACHE, named_cache
from midus_hf.models.router_losses import AddsRouterLosses

_IGNORED_LABEL = -100
# Name of the argument that marks the tokens of the prompt. Without it, the prompt ends at the first label.
_PROMPT_MASK = "prompt_mask"


class MemoryForCausalLM(AddsRouterLosses, HostsMemory):
    """Mixin for a family's language model: the family's own head and forward over a stack that hosts memory."""

    output_class = MoeCausalLMOutputWithPast
    model_class: ClassVar[Any]
    # Path of the stack of layers within the model.
    stack_path: ClassVar[str] = "model"
    config: Any

    def __init__(self, config):
        super().__init__(config)
        parent, _, name = self.stack_path.rpartition(".")
        holder = self.get_submodule(parent)
        setattr(holder, name, None)  # the family's stack is freed, and its name keeps the place before the head
        setattr(holder, name, self.model_class(config.get_text_config()))
        self.register_load_state_dict_pre_hook(refuse_adapter_of_base)
        list_model(
            type(self), modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        )  # by value, pickles would hold the table
        self.post_init()

    @property
    def stack(self) -> Any:
        """The stack of layers that host memories."""
        return self.get_submodule(self.stack_path)

    @needed_for("arguments", "banks", "reports", "places")
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        *,
        past_key_values: Cache | None = None,
        output_router_logits: bool | None = None,
        prompt_mask: torch.Tensor | None = None,
        token_mask: torch.Tensor | None = None,
        memory_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the family's forward, and add the losses of routers.

        Arguments that are not listed here are passed to the family's forward. The signature names `prompt_mask`, `token_mask` and
        `memory_ids`, since a Trainer drops the columns of a dataset that the signature lacks.

        Args:
            input_ids: `[B, T]`, or None if `inputs_embeds` are passed.
            cache: Keys and values of the tokens before. Default: none.
            inputs_embeds: `[B, T, D]`. Default: embeddings of `input_ids`.
            past_key_values: Older name of `cache`.
            output_router_logits: Whether to return the routers' logits and add their losses outside training too; if false, losses
                are never added. Default: the config's value; if that is None, losses are added in training.
            prompt_mask: `[B, T]`, true for tokens of the prompt, for memories that need it. Default: tokens before the first label.
            token_mask: `[B, T]`, zero for padding, for attention masks of another form. Default: the attention mask.
            memory_ids: `[B, p]`, the paths whose blocks the rows fetch, for memories that fetch.
            kwargs: Other arguments of the family's forward.
        """
        memory_arguments = {"prompt_mask": prompt_mask, "token_mask": token_mask, "memory_ids": memory_ids}
        kwargs |= {name: value for name, value in memory_arguments.items() if value is not None}
        kwargs |= {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            **named_cache(cache, past_key_values),
            "inputs_embeds": inputs_embeds,
            "labels": labels,
            "use_cache": use_cache,
            "logits_to_keep": logits_to_keep,
        }
        if not self.stack.needs.reports:
            return super().forward(**kwargs)
        if self.stack.needs.prompts and _PROMPT_MASK not in kwargs:
            if labels is not None:
                kwargs[_PROMPT_MASK] = prompt_of(labels)
            elif self.training and torch.is_grad_enabled():
                raise ValueError(
                    "routing is 'prompt', and a pass that trains has neither prompt_mask nor labels; expected one of them. Label "
                    "smoothing and a loss of your own take the labels away: give prompt_mask with them."
                )
        share = _share_of_step(labels, kwargs.get("num_items_in_batch"))
        return self.with_router_losses(super().forward, kwargs, output_router_logits, labels is not None, share)

    @needed_for("arguments", "banks")
    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        """Validate arguments of `generate` as the family does, without the arguments that memories take."""
        names: set[str] = self.stack.memory_input_names
        super()._validate_model_kwargs({key: value for key, value in model_kwargs.items() if key not in names})

    @needed_for("places", "prompts")
    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        *args: Any,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Prepare the inputs as the family does, and add a mask of padding, since static caches get a mask of another form.

        transformers reads from the signature whether embeddings may replace the prompt's ids.

        Raises:
            ValueError: If a memory chooses by the prompt, and the first pass has only a part of the prompt.
        """
        inputs = super().prepare_inputs_for_generation(
            input_ids, *args, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
        )
        tokens = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
        padding = attention_mask if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2 else None
        if self.stack.needs.prompts:
            cache = inputs.get(CACHE)
            if inputs.get(_PROMPT_MASK) is not None and cache is not None and cache.get_seq_length() > 0:
                del inputs[_PROMPT_MASK]  # the cache keeps what memories need of the prompt
            if inputs.get(_PROMPT_MASK) is not None:
                seen = max(input_ids.shape[1], tokens.shape[1]) if padding is None else padding.shape[1]
                inputs[_PROMPT_MASK] = _prompt_mask_of_pass(inputs[_PROMPT_MASK], seen, cache)
        if self.stack.needs.places and padding is not None:
            inputs["token_mask"] = padding[:, -tokens.shape[1] :].clone()
        return inputs

    @needed_for("arguments", "banks", "states")
    def _get_candidate_generator(self, *args: Any, model_kwargs: dict[str, Any], **kwargs: Any) -> Any:
        """Return the family's generator of candidates for assisted decoding, without the arguments that memories take."""
        if self.stack.needs.states:
            check_taking_back(self.stack.stateful)
        names: set[str] = self.stack.memory_input_names
        others = {key: value for key, value in model_kwargs.items() if key not in names}
        return super()._get_candidate_generator(*args, model_kwargs=others, **kwargs)

    @needed_for("prompts", "whole")
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the family does.

        Tensors that memories derive from weights alone, and the joined levels of fetched blocks, are computed once per call.

        If a memory reads the whole sequence, every new token takes a pass over all tokens so far, without a cache.

        Raises:
            ValueError: If a memory reads the whole sequence and a cache is passed, or embeddings, which need a cache.
        """
        if self.stack.needs.whole:
            if any(kwargs.get(name) is not None for name in (CACHE, "past_key_values")):
                raise ValueError(
                    "a cache is passed, but a memory of this model looks at the whole sequence, which no cache holds; "
                    "expected none. Upscale with routing = 'chunk' for a model that continues from a cache."
                )
            if kwargs.get("inputs_embeds") is not None:
                raise ValueError(
                    "inputs_embeds is given, but a memory of this model looks at the whole sequence, and what follows embeddings is "
                    "computed from a cache; expected input_ids. Or upscale with routing = 'chunk'."
                )
            warnings.warn(
                "a memory of this model chooses by the whole sequence, later tokens included: generation computes every token anew "
                "for each one that it adds, and what it computes of a token is not what training saw.",
                stacklevel=2,
            )
            kwargs["use_cache"] = False
        if self.stack.needs.prompts and _PROMPT_MASK not in kwargs:
            inputs = (
                args[0] if args else None,
                *(kwargs.get(name) for name in ("inputs", "input_ids", "inputs_embeds")),
            )
            prompt = next((tensor for tensor in inputs if isinstance(tensor, torch.Tensor)), None)
            if prompt is not None:  # set here, since a later pass without a cache holds answers too
                kwargs[_PROMPT_MASK] = torch.ones(prompt.shape[:2], dtype=torch.bool, device=prompt.device)
        if INSTALLED and self.stack.needs.banks and kwargs.get(BLOCKS) is not None:
            kwargs[BLOCKS] = {name: batch.joined() for name, batch in kwargs[BLOCKS].items()}
        if INSTALLED:
            with kept_values(self), self.banks.serving():
                return super().generate(*args, **kwargs)
        return super().generate(*args, **kwargs)

    @needed_for("states")
    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Make the manager of continuous batching, which all of its entry points call, as the family does.

        Raises:
            ValueError: If a memory keeps a state of a sequence.
        """
        if self.stack.needs.states:
            instead = "`generate`, or `transformers serve` without --continuous-batching"
            refuse_one_row(self.stack.stateful, "continuous batching", instead)
        return super().init_continuous_batching(*args, **kwargs)

    @needed_for("banks")
    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Generate for several requests in one row, as the family does. Kept tensors are computed once per call, as in `generate`.

        Raises:
            ValueError: If paths or blocks are passed: a row fetches the same blocks for all of its tokens.
        """
        for name in (IDS, BLOCKS):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name} is given, and continuous batching lays the tokens of several requests in one row, where all would read "
                    "the same blocks; expected `generate`, or none."
                )
        if INSTALLED:
            with kept_values(self):
                return super().generate_batch(*args, **kwargs)
        return super().generate_batch(*args, **kwargs)


def _prompt_mask_of_pass(prompt_mask: torch.Tensor, num_seen: int, cache: Any) -> torch.Tensor:
    """Return the mask of the prompt, extended to all tokens seen so far; tokens behind the mask do not belong to the prompt."""
    missing = num_seen - prompt_mask.shape[1]
    if missing < 0 and (cache is None or cache.get_seq_length() == 0):
        raise ValueError(
            f"the first pass has {num_seen} tokens of a prompt of {prompt_mask.shape[1]}, by all of which a memory of this model "
            "chooses; expected the whole prompt. Leave prefill_chunk_size out, or upscale with routing = 'chunk'."
        )
    return nn.functional.pad(prompt_mask, (0, max(missing, 0)))


def prompt_of(labels: torch.Tensor) -> torch.Tensor:
    """Return a mask `[B, T]` of the tokens before the first token that is to be predicted."""
    return (labels != _IGNORED_LABEL).cumsum(1) == 0


def _share_of_step(labels: torch.Tensor | None, num_items: torch.Tensor | int | None) -> torch.Tensor | float:
    """Return this pass's share of the tokens of a step, the weight of the routers' losses if a step has several passes."""
    if num_items is None or labels is None:
        return 1.0
    num_items = num_items.to(labels.device) if isinstance(num_items, torch.Tensor) else num_items
    return (labels[..., 1:] != _IGNORED_LABEL).sum() / num_items
