"""Mixins for composite models whose language model hosts memory, such as models that read images.

The composite model is the family's own: only its language model's stack of layers is replaced. What the composite model computes from
pictures or sounds reaches the stack as embeddings, and arguments of memories are passed on to it.
"""

from typing import Any, ClassVar

import torch
from transformers import AutoModel

from midus_hf.models.host import CodeMixin
from midus_hf.models.language_model import MemoryForCausalLM


class CompositeMemoryConfig(CodeMixin):
    """Mixin for the config of a composite model. Its `text_config` is the config of a family that hosts memory."""

    # Class of `text_config`.
    language_config_class: ClassVar[Any]
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
    """Mixin for a composite model: the family's own forward over a language model whose stack hosts memory."""

    def __init__(self, config):
        # Some families build their language model by the class of its config.
        AutoModel.register(type(config.get_text_config()), self.model_class, exist_ok=True)
        super().__init__(config)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the composite model. Its language model may get masks between pairs of tokens, so padding is passed on beside them.

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
