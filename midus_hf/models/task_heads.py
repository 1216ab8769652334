"""Mixins for a family's classifiers and its head that finds answers, over a stack that hosts memory."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import AutoModel, Cache
from transformers.modeling_outputs import QuestionAnsweringModelOutput, SequenceClassifierOutputWithPast

from midus_hf.memories.hosting.parts import Keywords, named_cache
from midus_hf.memories.hosting.service import HostStack
from midus_hf.models.host import HostMixin
from midus_hf.models.listing import list_model


@dataclass
class RoutedClassification(SequenceClassifierOutputWithPast):
    """Output of a classifier whose memories have routers: the family's output, then the losses and logits of the routers."""

    aux_loss: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None


@dataclass
class RoutedAnswer(QuestionAnsweringModelOutput):
    """Output of a head that finds answers, if its memories have routers: the family's output, then losses and logits of routers."""

    aux_loss: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None


class MemoryHead(HostMixin):
    """Mixin for a family's task head: the family's own head and forward over a stack that hosts memory.

    The stack is always the attribute `model`, as in the language model, whose checkpoint fills it. `LlamaForQuestionAnswering` calls
    its stack otherwise, and starts it at random.
    """

    base_model_prefix = "model"
    model_class: ClassVar[Any]
    model: Any
    config: Any

    def __init__(self, config):
        # Transformers' heads take their stack from this table, which code that a checkpoint carries has not filled.
        AutoModel.register(self.model_class.config_class, self.model_class, exist_ok=True)
        super().__init__(config)
        list_model(type(self))

    @property
    def stack(self) -> HostStack:
        """The stack of layers that host memories."""
        return self.model

    def _run(self, arguments: Keywords, cache: Any, past_key_values: Any, **of_memories: Any) -> Any:
        """Run the family's forward with those arguments of memories that are not None, and add the losses of routers."""
        if "report" not in self.stack.services:
            del of_memories["output_router_logits"]
        given = {name: value for name, value in of_memories.items() if value is not None}
        return self.run(super().forward, {**arguments, **named_cache(cache, past_key_values), **given})


class MemoryForClassification(MemoryHead):
    """Mixin for a family's classifier of sequences or of tokens."""

    output_class = RoutedClassification

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        past_key_values: Cache | None = None,
        output_router_logits: bool | None = None,
        token_mask: torch.Tensor | None = None,
        memory_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the family's forward, and add the losses of routers.

        Other arguments are described at `MemoryForCausalLM.forward`; they are named, since a Trainer drops the columns of a dataset
        that the signature lacks.

        Args:
            labels: `[B]`, or `[B, T]` of a classifier of tokens. Default: no loss is computed.
        """
        kwargs |= {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        kwargs |= {"inputs_embeds": inputs_embeds, "labels": labels}
        of_memories = {
            "output_router_logits": output_router_logits,
            "token_mask": token_mask,
            "memory_ids": memory_ids,
        }
        return self._run(kwargs, cache, past_key_values, **of_memories)


class MemoryForQuestionAnswering(MemoryHead):
    """Mixin for a family's head that finds the span of an answer."""

    output_class = RoutedAnswer

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        *,
        past_key_values: Cache | None = None,
        output_router_logits: bool | None = None,
        token_mask: torch.Tensor | None = None,
        memory_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the family's forward, and add the losses of routers.

        Other arguments are described at `MemoryForCausalLM.forward`.

        Args:
            start_positions: `[B]`, index of the first token of the answer. Default: no loss is computed.
            end_positions: `[B]`, index of the last token of the answer. Default: no loss is computed.
        """
        kwargs |= {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        kwargs |= {"inputs_embeds": inputs_embeds, "start_positions": start_positions, "end_positions": end_positions}
        of_memories = {
            "output_router_logits": output_router_logits,
            "token_mask": token_mask,
            "memory_ids": memory_ids,
        }
        return self._run(kwargs, cache, past_key_values, **of_memories)
