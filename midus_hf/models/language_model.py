"""Mixin for a family's language model over a stack that hosts memory."""

from typing import Any, ClassVar

import torch
from transformers import Cache
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from midus_hf.memories.decode_cache import decode_cache
from midus_hf.memories.hosting.parts import Keywords, named_cache
from midus_hf.memories.hosting.service import HostStack
from midus_hf.models.host import HostMixin
from midus_hf.models.listing import list_model

_IGNORED_LABEL = -100


class MemoryForCausalLM(HostMixin):
    """Mixin for a family's language model: the family's own head and forward over a stack that hosts memory."""

    output_class = MoeCausalLMOutputWithPast
    model_class: ClassVar[Any]
    # Path of the stack of layers within the model.
    stack_path: ClassVar[str] = "model"
    config: Any

    def __init__(self, config):
        super().__init__(config)
        parent, _, name = self.stack_path.rpartition(".")
        holder, text_config = self.get_submodule(parent), config.get_text_config()
        if any(getattr(layer, "gradient_checkpointing", False) for layer in self.stack.modules()):
            text_config.gradient_checkpointing = True  # taken out of the config by the family's stack
        setattr(holder, name, None)  # the family's stack is freed, and its name keeps the place before the head
        setattr(holder, name, self.model_class(text_config))
        list_model(type(self))
        self.post_init()

    @property
    def stack(self) -> HostStack:
        """The stack of layers that host memories."""
        return self.get_submodule(self.stack_path)

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
        token_mask: torch.Tensor | None = None,
        memory_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the family's forward, and add the losses of routers.

        Arguments that are not listed here are passed to the family's forward. The signature names `token_mask` and `memory_ids`,
        since a Trainer drops the columns of a dataset that the signature lacks.

        Args:
            input_ids: `[B, T]`, or None if `inputs_embeds` are passed.
            cache: Keys and values of the tokens before. Default: none.
            inputs_embeds: `[B, T, D]`. Default: embeddings of `input_ids`.
            past_key_values: Older name of `cache`.
            output_router_logits: Whether to return the routers' logits and add their losses outside training too; if false, losses
                are never added. Default: the config's value; if that is None, losses are added in training.
            token_mask: `[B, T]`, zero for padding, for attention masks of another form. Default: the attention mask.
            memory_ids: `[B, p]`, the paths whose blocks the rows fetch, for memories that fetch.
            kwargs: Other arguments of the family's forward.
        """
        inputs: Keywords = {"token_mask": token_mask, "memory_ids": memory_ids}
        if "report" in self.stack.services:
            inputs["output_router_logits"] = output_router_logits
        kwargs |= {name: value for name, value in inputs.items() if value is not None}
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
        return self.run(super().forward, kwargs)

    def share_of_step(self, arguments: Keywords) -> torch.Tensor | float:
        """Return this pass's share of the tokens of a step, the weight of the routers' losses if a step has several passes."""
        labels, num_items = arguments["labels"], arguments.get("num_items_in_batch")
        if num_items is None or labels is None:
            return 1.0
        num_items = num_items.to(labels.device) if isinstance(num_items, torch.Tensor) else num_items
        return (labels[..., 1:] != _IGNORED_LABEL).sum() / num_items

    def _validate_model_kwargs(self, model_kwargs: Keywords) -> None:
        """Validate arguments of `generate` as the family does, without the arguments that memories take."""
        names: set[str] = self.stack.memory_input_names
        super()._validate_model_kwargs({key: value for key, value in model_kwargs.items() if key not in names})

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        *args: Any,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Prepare the inputs as the family does, and let services add to them.

        transformers reads from the signature whether embeddings may replace the prompt's ids.
        """
        inputs = super().prepare_inputs_for_generation(
            input_ids, *args, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
        )
        for service in self.stack.services.values():
            service.prepare_inputs(inputs, attention_mask)
        return inputs

    def _get_candidate_generator(self, *args: Any, model_kwargs: Keywords, **kwargs: Any) -> Any:
        """Return the family's generator of candidates for assisted decoding, without the arguments that memories take."""
        for service in self.stack.services.values():
            service.check_assistant()
        names: set[str] = self.stack.memory_input_names
        others = {key: value for key, value in model_kwargs.items() if key not in names}
        return super()._get_candidate_generator(*args, model_kwargs=others, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the family does. Tensors that memories derive from weights alone are computed once per call."""
        for service in self.stack.services.values():
            service.before_generate(kwargs)
        with decode_cache(self):
            return super().generate(*args, **kwargs)

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Generate for several requests in one row, as the family does, with what `generate` computes once per call."""
        for service in self.stack.services.values():
            service.check_continuous_batching(kwargs)
        with decode_cache(self):
            return super().generate_batch(*args, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Make the manager of continuous batching, which all of its entry points call, as the family does."""
        for service in self.stack.services.values():
            service.check_continuous_batching({})
        return super().init_continuous_batching(*args, **kwargs)
