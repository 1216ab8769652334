"""Mixins for models over a stack that hosts memory: language models, task heads, and composite models."""

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import AutoModel, Cache, PreTrainedModel
from transformers.modeling_outputs import (
    MoeCausalLMOutputWithPast,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutputWithPast,
)
from transformers.models.auto import modeling_auto

from midus_hf.anatomy.types import MEMORY_PREFIX
from midus_hf.memories.decode_cache import decode_cache
from midus_hf.memories.hosting.parts import Keywords
from midus_hf.memories.hosting.service import HostStack
from midus_hf.models.host import CodeMixin, HostMixin

_IGNORED_LABEL = -100


def list_model(model_class: type[PreTrainedModel]) -> None:
    """List a class in Transformers' tables of models, which Trainer, pipelines and servers read."""
    own_type = model_class.config_class.model_type
    family_type = own_type.removeprefix(MEMORY_PREFIX)
    names = {parent.__name__ for parent in inspect.getmro(model_class)[1:]}
    family_tables = [
        table
        for name, table in vars(modeling_auto).items()
        if name.endswith("_MAPPING_NAMES") and table.get(family_type) in names
    ]
    language_tables = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,) if model_class.can_generate() else ()
    for table in (*language_tables, *family_tables):
        table.setdefault(own_type, model_class.__name__)


class MemoryForCausalLM(HostMixin):
    """Mixin for a family's language model over a stack that hosts memory."""

    output_class = MoeCausalLMOutputWithPast
    model_class: ClassVar[Any]
    # Path of the stack of layers within the model.
    stack_path: ClassVar[str] = "model"
    config: Any

    def __init__(self, config):
        super().__init__(config)
        parent, _, name = self.stack_path.rpartition(".")
        holder = self.get_submodule(parent)
        text_config = config.get_text_config()
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
        """Run the family's forward, which gets all other arguments, and add the losses of routers.

        A Trainer drops columns of a dataset that the signature lacks.

        Args:
            past_key_values: Older name of `cache`.
            output_router_logits: Whether to return the routers' logits and add their losses outside training too; if false, losses
                are never added. Default: the config's value; if that is None, losses are added in training.
            token_mask: `[B, T]`, zero for padding, for attention masks of another form. Default: the attention mask.
            memory_ids: `[B, p]`, the paths whose blocks the rows fetch, for memories that fetch.
        """
        kwargs |= {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        kwargs |= {"inputs_embeds": inputs_embeds, "labels": labels, "use_cache": use_cache}
        kwargs["logits_to_keep"] = logits_to_keep
        given = {"output_router_logits": output_router_logits, "token_mask": token_mask, "memory_ids": memory_ids}
        return self.run(kwargs, cache, past_key_values, **given)

    def share_of_step(self, arguments: Keywords) -> torch.Tensor | float:
        """Return this pass's share of a step's tokens, which weighs the routers' losses."""
        labels = arguments["labels"]
        num_items = arguments.get("num_items_in_batch")
        if num_items is None or labels is None:
            return 1.0
        num_items = num_items.to(labels.device) if isinstance(num_items, torch.Tensor) else num_items
        return (labels[..., 1:] != _IGNORED_LABEL).sum() / num_items

    def _without_memory_arguments(self, arguments: Keywords) -> Keywords:
        names: set[str] = self.stack.memory_input_names
        return {key: value for key, value in arguments.items() if key not in names}

    def _validate_model_kwargs(self, model_kwargs: Keywords) -> None:
        super()._validate_model_kwargs(self._without_memory_arguments(model_kwargs))

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        *args: Any,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Prepare the inputs as the family does, and let services add to them."""
        inputs = super().prepare_inputs_for_generation(
            input_ids, *args, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
        )
        for service in self.stack.services.values():
            service.prepare_inputs(inputs, attention_mask)
        return inputs

    def _get_candidate_generator(self, *args: Any, model_kwargs: Keywords, **kwargs: Any) -> Any:
        for service in self.stack.services.values():
            service.check_assistant()
        others = self._without_memory_arguments(model_kwargs)
        return super()._get_candidate_generator(*args, model_kwargs=others, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the family does; what memories derive from weights is computed once per call."""
        for service in self.stack.services.values():
            service.before_generate(kwargs)
        with decode_cache(self):
            return super().generate(*args, **kwargs)

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Generate for several requests in one row, as the family does; see `generate`."""
        for service in self.stack.services.values():
            service.check_continuous_batching(kwargs)
        with decode_cache(self):
            return super().generate_batch(*args, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Make the manager of continuous batching, which all of its entry points call, as the family does."""
        for service in self.stack.services.values():
            service.check_continuous_batching({})
        return super().init_continuous_batching(*args, **kwargs)


@dataclass
class RoutedClassification(SequenceClassifierOutputWithPast):
    """Output of a classifier whose memories have routers, with their losses and logits."""

    aux_loss: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None


@dataclass
class RoutedAnswer(QuestionAnsweringModelOutput):
    """Output of a head that finds answers, whose memories have routers, with their losses and logits."""

    aux_loss: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None


class MemoryHead(HostMixin):
    """Mixin for a family's task head: its own head and forward over a stack that hosts memory.

    The stack is always the attribute `model`, also of `LlamaForQuestionAnswering`, so that a language model's checkpoint fills it.
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
        """Run as `MemoryForCausalLM.forward`; `labels` are `[B]`, or `[B, T]` of tokens. Default: no loss."""
        kwargs |= {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        kwargs |= {"inputs_embeds": inputs_embeds, "labels": labels}
        given = {"output_router_logits": output_router_logits, "token_mask": token_mask, "memory_ids": memory_ids}
        return self.run(kwargs, cache, past_key_values, **given)


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
        """Run as `MemoryForCausalLM.forward`; positions `[B]`: the answer's first and last token, or no loss."""
        kwargs |= {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        kwargs |= {"inputs_embeds": inputs_embeds, "start_positions": start_positions, "end_positions": end_positions}
        given = {"output_router_logits": output_router_logits, "token_mask": token_mask, "memory_ids": memory_ids}
        return self.run(kwargs, cache, past_key_values, **given)


class CompositeMemoryConfig(CodeMixin):
    """Mixin for a composite model's config, whose `text_config` is that of a family that hosts memory."""

    language_config_class: ClassVar[Any]  # class of `text_config`
    # Name of the class of models of this config.
    composite_class_name: ClassVar[str]
    text_config: Any

    def __post_init__(self, **kwargs: Any) -> None:
        language = self.text_config
        if not isinstance(language, self.language_config_class):
            values = language if isinstance(language, dict) else {} if language is None else language.to_dict()
            own = {key: value for key, value in values.items() if key not in ("model_type", "auto_map")}
            self.text_config = self.language_config_class(**own)
        super().__post_init__(**kwargs)

    @classmethod
    def class_names(cls) -> dict[str, str]:
        """Return the names of the config, and of the model for each Auto class that loads it."""
        auto_classes = ("AutoModelForImageTextToText", "AutoModelForMultimodalLM", "AutoModelForCausalLM")
        return {"AutoConfig": cls.__name__, **dict.fromkeys(auto_classes, cls.composite_class_name)}

    def to_dict(self) -> dict[str, Any]:
        """Return the result of `CodeMixin.to_dict`; the language model's config has no `auto_map`."""
        values = super().to_dict()
        values["text_config"].pop("auto_map", None)
        return values


class MemoryForConditionalGeneration(MemoryForCausalLM):
    """Mixin for a composite model: the family's, with its language model's stack replaced.

    What it computes from pictures or sounds reaches the stack as embeddings; arguments of memories are passed on to the stack.
    """

    def __init__(self, config):
        # Some families build their language model by the class of its config.
        AutoModel.register(type(config.get_text_config()), self.model_class, exist_ok=True)
        super().__init__(config)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run as `MemoryForCausalLM.forward`; pass padding on, since masks may be between pairs of tokens."""
        padding = kwargs.get("attention_mask")
        if "tokens" in self.stack.services and isinstance(padding, torch.Tensor) and padding.dim() == 2:
            if kwargs.get("token_mask") is None:
                kwargs["token_mask"] = padding
        if "input_ids" in self.stack.memory_input_names and kwargs.get("input_ids") is not None:
            kwargs.setdefault("token_ids", kwargs["input_ids"])
        return super().forward(*args, **kwargs)
