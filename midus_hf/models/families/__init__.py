"""The table of backbone families that host memory, filled by the families themselves."""

from transformers import PreTrainedConfig, PreTrainedModel

FAMILIES: dict[str, type[PreTrainedModel]] = {}
"""Language models that host memory, by the `model_type` of the family they host it for."""


def register_family(causal_lm_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Enter a language model under the `model_type` of the config that its own config extends."""
    FAMILIES[base_config_class(causal_lm_class.config_class).model_type] = causal_lm_class
    return causal_lm_class


def base_config_class(config_class: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The family's own config class, which a config that hosts memory extends."""
    own_type = config_class.model_type
    return next(
        parent
        for parent in config_class.__mro__
        if issubclass(parent, PreTrainedConfig) and parent.model_type not in ("", own_type)
    )
