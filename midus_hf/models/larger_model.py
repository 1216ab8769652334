"""Mixins for larger models whose language model hosts memory, such as models that read images.

The larger model is the family's own: only its language model's stack of layers is replaced. What the larger model computes from
pictures or sounds reaches the stack as embeddings, and arguments of memories are passed on to it.
"""

import os
import sys
from typing import Any, ClassVar

import torch
from transformers import AutoModel

from midus_hf.carried.module import write_code
from midus_hf.carried.standins import ENTRY_MODULE
from midus_hf.config.memory_entries import Memories, memories_of
from midus_hf.models.language_model import MemoryForCausalLM
from midus_hf.models.listing import show_in_transformers
from midus_hf.models.parts import CACHE


class LargerMemoryConfig:
    """Mixin for the config of a larger model. Its `text_config` is the config of a family that hosts memory."""

    # Class of `text_config`.
    language_config_class: ClassVar[Any]
    # Name of the class of models of this config.
    larger_class_name: ClassVar[str]
    keys_to_ignore_at_inference = [CACHE, "router_logits", "aux_loss"]
    text_config: Any

    def __post_init__(self, **kwargs: Any) -> None:
        language = self.text_config
        if not isinstance(language, self.language_config_class):
            values = language if isinstance(language, dict) else {} if language is None else language.to_dict()
            own = {key: value for key, value in values.items() if key not in ("model_type", "auto_map")}
            self.text_config = self.language_config_class(**own)
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return the result of `PreTrainedConfig.to_dict`, with an `auto_map` that names the code saved beside the config."""
        values: dict[str, Any] = super().to_dict()
        values["text_config"].pop("auto_map", None)
        name = f"{ENTRY_MODULE}.{self.larger_class_name}"
        classes = {"AutoModelForImageTextToText": name, "AutoModelForMultimodalLM": name, "AutoModelForCausalLM": name}
        return {**values, "auto_map": {"AutoConfig": f"{ENTRY_MODULE}.{type(self).__name__}", **classes}}

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> Any:
        """Save the config, and beside it the code that its `auto_map` names."""
        write_code(save_directory, self)
        return super().save_pretrained(save_directory, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Let `transformers serve` find the model of this code, as `MemoryConfig` does for a language model."""
        name = cls.larger_class_name
        show_in_transformers(name, getattr(sys.modules[cls.__module__], name))

    def memories(self) -> Memories:
        """Return the memories of the language model.

        Raises:
            ValueError: If `read_memories` refuses the list of its config.
        """
        return memories_of(self)


class MemoryForConditionalGeneration(MemoryForCausalLM):
    """Mixin for a larger model: the family's own forward over a language model whose stack hosts memory."""

    def __init__(self, config):
        # Some families build their language model by the class of its config.
        AutoModel.register(type(config.get_text_config()), self.model_class, exist_ok=True)
        super().__init__(config)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the larger model. Its language model may get masks between pairs of tokens, so padding is passed on beside them.

        Args:
            args: Arguments of `MemoryForCausalLM.forward`, whose names a class of models lists.
            kwargs: Arguments of `MemoryForCausalLM.forward`, and of the family's forward.
        """
        padding = kwargs.get("attention_mask")
        if "tokens" in self.stack.services and isinstance(padding, torch.Tensor) and padding.dim() == 2:
            if kwargs.get("token_mask") is None:
                kwargs["token_mask"] = padding
        if "input_ids" in self.stack.memory_input_names and kwargs.get("input_ids") is not None:
            kwargs.setdefault("token_ids", kwargs["input_ids"])
        return super().forward(*args, **kwargs)
