"""Mixin for a family's language model over a stack that hosts memory."""

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Cache, PreTrainedModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from midus_hf.config.installed import INSTALLED, needed_for
from midus_hf.memory.kept_values import kept_values
from midus_hf.memory.routing.report import RouterReports
from midus_hf.models.adapter_layers import refuse_adapter_of_base
from midus_hf.models.fetching import BLOCKS
from midus_hf.models.host import HostsMemory

_IGNORED_LABEL = -100
# Name of the argument that marks the tokens of the prompt. Without it, the prompt ends at the first label.
_PROMPT_MASK = "prompt_mask"


class MemoryForCausalLM(HostsMemory):
    """Mixin for a family's language model: the family's own head and forward over a stack that hosts memory.

    If memories have routers, the routers' losses are added to the model's loss in training, as in transformers' mixture-of-experts
    models. If `output_router_logits`, an argument of `forward` or an attribute of the config, is true, the routers' logits are
    returned, and the losses are added outside training too. If it is false, the losses are never added.
    """

    model_class: ClassVar[type[PreTrainedModel]]
    model: Any
    config: Any
    training: bool

    def __init__(self, config):
        PreTrainedModel.__init__(self, config)
        self.model = self.model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.register_load_state_dict_pre_hook(refuse_adapter_of_base)
        self.post_init()

    @needed_for("arguments", "banks", "reports", "places")
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        *,
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
            inputs_embeds: `[B, T, D]`. Default: embeddings of `input_ids`.
            output_router_logits: Whether to return the routers' logits and add their losses outside training too; if false, losses
                are never added. Default: the config's value; if that is None, losses are added in training.
            prompt_mask: `[B, T]`, true for tokens of the prompt, for memories that need it. Default: tokens before the first label.
            token_mask: `[B, T]`, zero for padding, for attention masks of another form. Default: the attention mask.
            memory_ids: `[B, p]`, the paths whose blocks the rows fetch, for memories that fetch.
            kwargs: Other arguments of the family's forward.
        """
        of_memories = {"prompt_mask": prompt_mask, "token_mask": token_mask, "memory_ids": memory_ids}
        kwargs |= {name: value for name, value in of_memories.items() if value is not None}
        kwargs |= {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "inputs_embeds": inputs_embeds,
            "labels": labels,
            "use_cache": use_cache,
            "logits_to_keep": logits_to_keep,
        }
        if not self.model.needs.reports:
            return super().forward(**kwargs)
        if self.model.needs.prompts and labels is not None:
            kwargs.setdefault(_PROMPT_MASK, prompt_of(labels))
        wanted = (
            getattr(self.config, "output_router_logits", None)
            if output_router_logits is None
            else output_router_logits
        )
        learns = self.training and torch.is_grad_enabled()
        if learns and labels is None:
            _check_pass_without_labels(self.model, kwargs, wanted)
        trains = learns and labels is not None
        if wanted is False or not (wanted or trains):
            return super().forward(**kwargs)
        return_dict = kwargs.pop("return_dict", None)
        reports = RouterReports(needs_gradient=trains)
        family_output = super().forward(**kwargs, memory_reports=reports, return_dict=True)
        added, loss = reports.loss(), family_output.loss
        if loss is not None and added is not None:
            share = _share_of_step(labels, kwargs.get("num_items_in_batch"))
            loss = loss + (share.to(loss.device) if isinstance(share, torch.Tensor) else share) * added.to(loss.device)
        output = MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=added,
            logits=family_output.logits,
            past_key_values=family_output.past_key_values,
            hidden_states=family_output.hidden_states,
            attentions=family_output.attentions,
            router_logits=reports.logits() if wanted else None,
        )
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()

    @needed_for("arguments", "banks")
    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        """Validate arguments of `generate` as the family does, without the arguments that memories take."""
        names: set[str] = self.model.memory_input_names
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
        if self.model.needs.prompts:
            cache = inputs.get("past_key_values")
            if inputs.get(_PROMPT_MASK) is not None and cache is not None and cache.get_seq_length() > 0:
                del inputs[_PROMPT_MASK]  # the cache keeps what memories need of the prompt
            if inputs.get(_PROMPT_MASK) is not None:
                seen = max(input_ids.shape[1], tokens.shape[1]) if padding is None else padding.shape[1]
                inputs[_PROMPT_MASK] = _prompt_mask_of_pass(inputs[_PROMPT_MASK], seen, cache)
        if self.model.needs.places and padding is not None:
            inputs["token_mask"] = padding[:, -tokens.shape[1] :].clone()
        return inputs

    @needed_for("arguments", "banks", "states")
    def _get_candidate_generator(self, *args: Any, model_kwargs: dict[str, Any], **kwargs: Any) -> Any:
        """Return the family's generator of candidates for assisted decoding, without the arguments that memories take.

        Raises:
            ValueError: If a memory cannot take back the tokens of a rejected draft.
        """
        if self.model.needs.states:
            self.model.check_taking_back()
        names: set[str] = self.model.memory_input_names
        others = {key: value for key, value in model_kwargs.items() if key not in names}
        return super()._get_candidate_generator(*args, model_kwargs=others, **kwargs)

    @needed_for("banks", "prompts", "whole")
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the family does.

        Tensors that memories derive from weights alone, and the joined levels of fetched blocks, are computed once per call.

        If a memory reads the whole sequence, every new token takes a pass over all tokens so far, without a cache.

        Raises:
            ValueError: If a memory reads the whole sequence and a cache is passed, or embeddings, which need a cache.
        """
        if self.model.needs.whole:
            if kwargs.get("past_key_values") is not None:
                raise ValueError(
                    "past_key_values is given, but a memory of this model looks at the whole sequence, which no cache holds; "
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
        if self.model.needs.prompts and _PROMPT_MASK not in kwargs:
            inputs = (
                args[0] if args else None,
                *(kwargs.get(name) for name in ("inputs", "input_ids", "inputs_embeds")),
            )
            prompt = next((tensor for tensor in inputs if isinstance(tensor, torch.Tensor)), None)
            if prompt is not None:  # set here, since a later pass without a cache holds answers too
                kwargs[_PROMPT_MASK] = torch.ones(prompt.shape[:2], dtype=torch.bool, device=prompt.device)
        if self.model.needs.banks and kwargs.get(BLOCKS) is not None:
            kwargs[BLOCKS] = {name: batch.joined() for name, batch in kwargs[BLOCKS].items()}
        if INSTALLED:
            with kept_values(self), self.banks.serving():
                return super().generate(*args, **kwargs)
        return super().generate(*args, **kwargs)


def _check_pass_without_labels(model: Any, arguments: Mapping[str, Any], wanted: bool | None) -> None:
    """Check a training pass whose loss is computed outside the model; warn if losses of routers are missing.

    Raises:
        ValueError: If a memory chooses by the prompt, and the prompt is not known: answers would be pooled with it.
    """
    if model.needs.prompts and _PROMPT_MASK not in arguments:
        raise ValueError(
            "routing is 'prompt', and a pass that trains has neither prompt_mask nor labels; expected one of them. Label smoothing "
            "and a loss of your own take the labels away: give prompt_mask with them."
        )
    if wanted is None:
        warnings.warn(
            "a pass that trains has no labels, so the losses of its routers are not added; where the loss is computed outside the "
            "model, call it with output_router_logits=True and add aux_loss.",
            stacklevel=4,
        )


def _prompt_mask_of_pass(prompt_mask: torch.Tensor, num_seen: int, cache: Any) -> torch.Tensor:
    """Return the mask of the prompt, extended to all tokens seen so far; tokens behind the mask do not belong to the prompt.

    Args:
        prompt_mask: `[B, P]`, true for tokens of the prompt.
        num_seen: Number of tokens of the pass and of all passes before it.
        cache: The cache of the pass.

    Raises:
        ValueError: If the pass is the first, and has only a part of the prompt.
    """
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
