"""What a family's language model needs over a stack that hosts memory."""

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
_PROMPT_MASK = "prompt_mask"
"""What a memory asks for that is told which tokens are the prompt: without it, labels say so."""


class MemoryForCausalLM(HostsMemory):
    """Mixin for a family's language model: the family's own head and forward over a stack that hosts memory.

    Where memories have routers, their losses are added to the model's own in training, as the mixture-of-experts models of
    transformers do; `output_router_logits`, an argument of `forward` or an attribute of the config, gives the logits as well, and
    adds the losses out of training too; false leaves them out altogether.
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
        """As the family's forward, with the losses of routers. A Trainer drops the columns of a dataset that the signature lacks.

        Args:
            input_ids: As the family takes them, `[B, T]`.
            attention_mask: As the family takes it.
            position_ids: As the family takes them.
            past_key_values: As the family takes them.
            inputs_embeds: As the family takes them, `[B, T, D]`.
            labels: As the family takes them.
            use_cache: As the family takes it.
            logits_to_keep: As the family takes it.
            output_router_logits: Whether to return the logits of routers, and add their losses out of training too; false leaves
                them out altogether. Default: that of the config; losses are added in training.
            prompt_mask: `[B, T]`, true for tokens of the prompt, for memories that choose by it. Default: what labels leave out.
            token_mask: As the stack takes it.
            memory_ids: `[B, p]`, the blocks that each text fetches, for memories that fetch.
            kwargs: What else the family's forward takes.
        """
        told = {"prompt_mask": prompt_mask, "token_mask": token_mask, "memory_ids": memory_ids}
        kwargs |= {name: value for name, value in told.items() if value is not None}
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
        """As the family's, which does not know of what memories ask for."""
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
        """As the family's, which makes a mask of another form for static caches: padding is told as well.

        transformers looks at the signature to see that embeddings may stand for the prompt.

        Raises:
            ValueError: If a pass begins that has a part of the prompt by which a memory chooses.
        """
        inputs = super().prepare_inputs_for_generation(
            input_ids, *args, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
        )
        tokens = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
        padding = attention_mask if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2 else None
        if self.model.needs.prompts:
            cache = inputs.get("past_key_values")
            if inputs.get(_PROMPT_MASK) is not None and cache is not None and cache.get_seq_length() > 0:
                del inputs[_PROMPT_MASK]  # the cache keeps what follows from it
            if inputs.get(_PROMPT_MASK) is not None:
                seen = max(input_ids.shape[1], tokens.shape[1]) if padding is None else padding.shape[1]
                inputs[_PROMPT_MASK] = _prompt_mask_of_pass(inputs[_PROMPT_MASK], seen, cache)
        if self.model.needs.places and padding is not None:
            inputs["token_mask"] = padding[:, -tokens.shape[1] :].clone()
        return inputs

    @needed_for("arguments", "banks", "states")
    def _get_candidate_generator(self, *args: Any, model_kwargs: dict[str, Any], **kwargs: Any) -> Any:
        """As the family's, for assisted decoding; the assistant is not told what memories of this model ask for.

        Raises:
            ValueError: If a memory cannot take back the tokens of a draft that is refused.
        """
        if self.model.needs.states:
            self.model.check_taking_back()
        names: set[str] = self.model.memory_input_names
        told = {key: value for key, value in model_kwargs.items() if key not in names}
        return super()._get_candidate_generator(*args, model_kwargs=told, **kwargs)

    @needed_for("banks", "prompts", "whole")
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As the family's `generate`; what memories derive from weights alone is derived once for the call, and the levels of blocks
        that texts fetch are joined once.

        Where a memory looks at the whole sequence, every token takes a pass over all tokens so far, without a cache.

        Raises:
            ValueError: If a cache, or embeddings, which need one, are given to a model that looks at the whole sequence.
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
            given = (
                args[0] if args else None,
                *(kwargs.get(name) for name in ("inputs", "input_ids", "inputs_embeds")),
            )
            prompt = next((tensor for tensor in given if isinstance(tensor, torch.Tensor)), None)
            if prompt is not None:  # passes without a cache see more than the prompt
                kwargs[_PROMPT_MASK] = torch.ones(prompt.shape[:2], dtype=torch.bool, device=prompt.device)
        if self.model.needs.banks and kwargs.get(BLOCKS) is not None:
            kwargs[BLOCKS] = {name: batch.joined() for name, batch in kwargs[BLOCKS].items()}
        if INSTALLED:
            with kept_values(self), self.banks.serving():
                return super().generate(*args, **kwargs)
        return super().generate(*args, **kwargs)


def _check_pass_without_labels(model: Any, given: Mapping[str, Any], wanted: bool | None) -> None:
    """Say what a pass that trains lacks where its loss is computed outside the model.

    Raises:
        ValueError: If a memory chooses by the prompt, and nothing says what that is: answers would be pooled with it.
    """
    if model.needs.prompts and _PROMPT_MASK not in given:
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
    """A mask of the prompt for as many tokens as there are by now: those behind the mask are no prompt.

    Args:
        prompt_mask: `[B, P]`.
        num_seen: Tokens of the pass, and of those before it.
        cache: Of the pass.

    Raises:
        ValueError: If the pass is the first, and has a part of the prompt.
    """
    missing = num_seen - prompt_mask.shape[1]
    if missing < 0 and (cache is None or cache.get_seq_length() == 0):
        raise ValueError(
            f"the first pass has {num_seen} tokens of a prompt of {prompt_mask.shape[1]}, by all of which a memory of this model "
            "chooses; expected the whole prompt. Leave prefill_chunk_size out, or upscale with routing = 'chunk'."
        )
    return nn.functional.pad(prompt_mask, (0, max(missing, 0)))


def prompt_of(labels: torch.Tensor) -> torch.Tensor:
    """The tokens `[B, T]` in front of the first that is to be predicted."""
    return (labels != _IGNORED_LABEL).cumsum(1) == 0


def _share_of_step(labels: torch.Tensor | None, num_items: torch.Tensor | int | None) -> torch.Tensor | float:
    """How much of a step this pass is: a loss that is divided by the tokens of all passes of a step has to be weighted so."""
    if num_items is None or labels is None:
        return 1.0
    num_items = num_items.to(labels.device) if isinstance(num_items, torch.Tensor) else num_items
    return (labels[..., 1:] != _IGNORED_LABEL).sum() / num_items
