"""Modules of larger models whose language model hosts memory, made from what Transformers builds.

Nothing is written down per type: where the language model stands in the larger one, and what the larger model's forward takes,
are read from a tiny random model.
"""

import inspect
from types import ModuleType
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from midus_hf.models.families import FAMILIES
from midus_hf.models.inference.family_modules import host_family, module_from_source
from midus_hf.models.inference.tiny import UnknownArchitecture, tiny_larger_model


def is_larger(model_type: str) -> bool:
    """Return whether a type of transformers holds a language model within a larger model."""
    return "text_config" in CONFIG_MAPPING[model_type].sub_configs


def host_larger_family(model_type: str) -> ModuleType:
    """Make the classes of a larger model whose language model hosts memory, and register them.

    Args:
        model_type: The `model_type` of a larger model of transformers.

    Returns:
        The module of the classes, `midus_hf.models.families.MODEL_TYPE`.

    Raises:
        UnknownArchitecture: If the larger model cannot host memory. The message says why.
    """
    return module_from_source(model_type, larger_family_source(model_type))


def larger_family_source(model_type: str) -> str:
    """Return the source of the classes of a larger model whose language model hosts memory.

    Args:
        model_type: The `model_type` of a larger model of transformers.

    Raises:
        UnknownArchitecture: If the larger model cannot host memory. The message says why.
    """
    model: Any = tiny_larger_model(model_type)
    language_config = model.config.get_text_config(decoder=True)
    language_type = language_config.model_type
    if type(language_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnknownArchitecture(
            f"{model_type!r} holds a language model, {language_type!r}, that transformers loads only within a larger model; expected "
            "a language model that transformers loads alone too."
        )
    if language_type not in FAMILIES:
        host_family(language_type)
    language: Any = FAMILIES[language_type]
    path = _path_of_stack(model, language)
    if not is_passed_on(model, path):
        raise UnknownArchitecture(
            f"{model_type!r} does not pass all keyword arguments on to its language model; expected a model that does."
        )
    larger, config = type(model), type(model.config)
    converted = any(map(get_checkpoint_conversion_mapping, (model_type, larger.__name__)))
    parameters = [
        parameter
        for parameter in inspect.signature(larger.forward).parameters.values()
        if parameter.name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    names = [parameter.name for parameter in parameters]
    names += [name for name in _OF_MEMORIES if name not in names]
    defaults = {parameter.name: parameter.default for parameter in parameters}
    return _SOURCE.format(
        model_type=model_type,
        config_module=config.__module__,
        config=config.__name__,
        modeling=larger.__module__,
        larger=larger.__name__,
        language_module=language.__module__,
        language_config=language.config_class.__name__,
        language_model=language.model_class.__name__,
        path=path,
        shared="from midus_hf.models.listing import share_conversions\n" if converted else "",
        signature="".join(f"        {name}={defaults.get(name)!r},\n" for name in names),
        arguments="".join(f"            {name}={name},\n" for name in names),
        conversions=f"\n\nshare_conversions(Midus{larger.__name__})\n" if converted else "",
    )


def _path_of_stack(model: PreTrainedModel, language: Any) -> str:
    """Return where a larger model holds the stack of layers of a language model."""
    stack_class = language.model_class.__bases__[-1]
    paths = [name for name, module in model.named_modules() if type(module) is stack_class]
    if len(paths) != 1:
        raise UnknownArchitecture(
            f"{model.config.model_type!r} holds {len(paths)} stacks of class {stack_class.__name__}; expected that of its language "
            "model alone."
        )
    return paths[0]


def is_passed_on(model: PreTrainedModel, path: str) -> bool:
    """Return whether a larger model passes arguments that it does not know on to its language model.

    Args:
        model: A small larger model.
        path: Path of the language model's stack of layers.

    Raises:
        UnknownArchitecture: If a pass with an unknown argument fails.
    """
    received = []

    def take_mark(_: Any, args: Any, kwargs: Any) -> Any:
        received.append(kwargs.pop(_MARK, None))
        return args, kwargs

    handle = model.get_submodule(path).register_forward_pre_hook(take_mark, with_kwargs=True)
    try:
        with torch.no_grad():
            model(input_ids=torch.arange(3, 10)[None], use_cache=False, **{_MARK: _MARK})
    except Exception as error:  # models raise whatever their parts raise
        raise UnknownArchitecture(
            f"a pass through a tiny model of {model.config.model_type!r} fails with an argument for its language model "
            f"({type(error).__name__}: {error})."
        ) from None
    finally:
        handle.remove()
    return received == [_MARK]


# The older name of the cache, and arguments of memories, which the signature of a forward names.
_OF_MEMORIES = ("past_key_values", "output_router_logits", "prompt_mask", "token_mask", "memory_ids")
# Argument that a larger model does not know, and must pass on.
_MARK = "memory_reports"

_SOURCE = '''"""{larger} with memory in its language model."""

from {config_module} import {config}
from {modeling} import {larger}

from {language_module} import {language_config} as LanguageConfig
from {language_module} import {language_model}
{shared}from midus_hf.models.larger_model import LargerMemoryConfig, MemoryForConditionalGeneration
from midus_hf.models.families import register_larger_family


class Midus{config}(LargerMemoryConfig, {config}):
    """`{config}` whose language model has a list of memory entries."""

    model_type = "midus_{model_type}"
    language_config_class = LanguageConfig
    larger_class_name = "Midus{larger}"


@register_larger_family
class Midus{larger}(MemoryForConditionalGeneration, {larger}):
    """`{larger}` whose language model is a `{language_model}`."""

    config: Midus{config}
    model_class = {language_model}
    stack_path = "{path}"

    def forward(
        self,
{signature}        **kwargs,
    ):
        """Run the family's forward; arguments are passed on by name."""
        return super().forward(
{arguments}            **kwargs,
        )
{conversions}'''
