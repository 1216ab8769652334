"""The language model within a composite model (such as one that reads images) as a checkpoint.

Everything is planned and verified on the language model, under the names of a separate checkpoint. Only code that reads and writes
knows the composite config and stored names, read from the model that transformers builds on the meta device.
"""

import copy
import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from midus_hf.anatomy.record import LANGUAGE_KEY, language_entry
from midus_hf.anatomy.types import MEMORY_PREFIX
from midus_hf.config.errors import RequestError
from upscalers.architecture.layer_tensors import OF_UPSCALING, Config, Shape
from upscalers.request import one_line

_STACK, _HEAD = "model.", "lm_head."
_HOST = "Midus"  # prefix of the names of classes that host memory
# Keys of a config that describe the file, and not the architecture.
_OF_FILE = ("_name_or_path", "transformers_version", "architectures", "auto_map")


@dataclass(frozen=True)
class TensorNames:
    """Stored names of a composite model: prefixes of the language model's stack and head, and all others."""

    stack: str
    head: str
    others: dict[str, Shape]

    def language_name(self, stored: str) -> str:
        for prefix, standard in ((self.stack, _STACK), (self.head, _HEAD)):
            if stored.startswith(prefix):
                return standard + stored.removeprefix(prefix)
        return stored

    def stored_name(self, name: str) -> str:
        """Return the stored name of a tensor, by the name that it would have in a separate language model."""
        if name in self.others:
            return name
        for prefix, standard in ((self.stack, _STACK), (self.head, _HEAD)):
            if name.startswith(standard):
                return prefix + name.removeprefix(standard)
        return name


@dataclass(frozen=True)
class CompositeModel:
    """The model around a language model."""

    config: Config
    language_config: Config
    known_names: tuple[TensorNames, ...]
    auto_class: str

    @property
    def names(self) -> TensorNames:
        return self.known_names[0]

    def with_stored_names(self, stored: Iterable[str]) -> "CompositeModel":
        stored = tuple(stored)
        present = (each for each in self.known_names if any(name.startswith(each.stack) for name in stored))
        return dataclasses.replace(self, known_names=(next(present, self.names),))

    def check_hosts(self) -> None:
        from midus_hf.models.families import COMPOSITE_FAMILIES
        from midus_hf.models.families.template import host_type

        model_type = str(self.config["model_type"]).removeprefix(MEMORY_PREFIX)
        if model_type in COMPOSITE_FAMILIES:
            return
        try:
            host_type(model_type)
        except RequestError as error:
            raise RequestError(
                f"the language model within {model_type!r} cannot host memory: {one_line(error)} Choose a method that adds ordinary "
                "layers of the family, or extract the language model first (upscale extract)."
            ) from None

    def wrapped(self, config: Config) -> Config:
        """Return a composite config around a language model's config; it hosts memories if the latter does."""
        inner = {key: value for key, value in config.items() if key not in ("auto_map", "architectures", "dtype")}
        outer = {key: value for key, value in self.config.items() if key not in ("auto_map", "dtype", "torch_dtype")}
        outer["model_type"] = str(outer["model_type"]).removeprefix(MEMORY_PREFIX)
        if config["model_type"].startswith(MEMORY_PREFIX):
            outer["model_type"] = MEMORY_PREFIX + outer["model_type"]
            names = [name.removeprefix(_HOST) for name in outer.get("architectures") or []]
            outer["architectures"] = [f"{_HOST}{name}" for name in names]
            auto_map = config.get("auto_map", self.config.get("auto_map"))
            outer |= {} if auto_map is None else {"auto_map": auto_map}
        if config.get("dtype") is not None:
            outer["dtype"] = config["dtype"]
        return {**outer, LANGUAGE_KEY: inner}


def composite_model_of(config: Config) -> CompositeModel:
    """Return the composite model of a raw config that contains a language model's config, or refuse it."""
    native = _native(config)
    built = _built(json.dumps(native, sort_keys=True))
    inner = language_entry(config)
    added = {key: inner[key] for key in (*OF_UPSCALING, "model_type") if key in inner}
    dtype = config.get("dtype", config.get("torch_dtype"))
    language_config = {**copy.deepcopy(built.language_config), **copy.deepcopy(added)}
    if dtype is not None:
        language_config["dtype"] = dtype
    return dataclasses.replace(built, config=config, language_config=language_config)


def _native(config: Config) -> Config:
    native = {key: value for key, value in config.items() if key not in OF_UPSCALING}
    inner = {key: value for key, value in config[LANGUAGE_KEY].items() if key not in OF_UPSCALING}
    for values in (native, inner):
        if isinstance(values.get("model_type"), str):
            values["model_type"] = values["model_type"].removeprefix(MEMORY_PREFIX)
    return {**native, LANGUAGE_KEY: inner}


@cache
def _built(native: str) -> CompositeModel:
    """Return a composite model's config, language model and tensor names, from one on the meta device."""
    import torch
    from transformers import (
        CONFIG_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
        __version__,
    )
    from transformers.core_model_loading import revert_weight_conversion

    from midus_hf.memories.hosting.parts import decoder_of
    from upscalers.architecture.built_layout import model_on_meta

    model_type = json.loads(native)["model_type"]

    def refused(reason: str, expected: str) -> RequestError:
        return RequestError(
            f"model_type {model_type!r} {reason} (transformers {__version__}); expected {expected}. Install a newer transformers if "
            "the model is newer, or save the language model as a separate checkpoint first."
        )

    if model_type not in CONFIG_MAPPING:
        raise refused("is unknown", "a model that transformers knows")
    config_class = CONFIG_MAPPING[model_type]
    mappings: dict[str, Any] = {
        "AutoModelForImageTextToText": MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        "AutoModelForMultimodalLM": MODEL_FOR_MULTIMODAL_LM_MAPPING,
    }
    auto_class = next((name for name, mapping in mappings.items() if config_class in mapping), None)
    if auto_class is None:
        raise refused("is loaded by no class for text and images or sounds", "one of AutoModelForImageTextToText")
    model = model_on_meta(json.loads(native), mappings[auto_class])
    language_config = model.config.get_text_config(decoder=True)
    if type(language_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        reason = f"holds a language model, {language_config.model_type!r}, that transformers loads only within a composite model"
        raise refused(reason, "one that is also loaded separately")
    causal_lm: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(language_config)]
    with torch.device("meta"):
        separate = causal_lm(copy.deepcopy(language_config))
    stack_class = type(decoder_of(separate))
    head = model.get_output_embeddings()
    paths = [name for name, module in model.named_modules() if type(module) is stack_class]
    heads = [name for name, module in model.named_modules() if module is head and head is not None]
    if len(paths) != 1 or len(heads) != 1 or type(getattr(separate, _STACK.rstrip("."), None)) is not stack_class:
        reason = f"contains its language model in a different form than {causal_lm.__name__}"
        raise refused(reason, f"one stack of class {stack_class.__name__} and one head")
    held = model.state_dict(keep_vars=True)
    embedding = next(name for name, each in model.named_modules() if each is model.get_input_embeddings())
    standard = embedding.removeprefix(f"{paths[0]}.")

    def stored(name: str) -> str:
        return next(iter(revert_weight_conversion(model, {name: held[name]})))

    outside = {name: tensor for name, tensor in held.items() if not name.startswith((f"{paths[0]}.", f"{heads[0]}."))}
    written = TensorNames(
        stored(f"{embedding}.weight").removesuffix(f"{standard}.weight"),
        stored(f"{heads[0]}.weight").removesuffix("weight"),
        _shapes(revert_weight_conversion(model, outside)),
    )
    direct = TensorNames(f"{paths[0]}.", f"{heads[0]}.", _shapes(outside))
    values = {key: value for key, value in language_config.to_dict().items() if key not in _OF_FILE}
    if (tied := getattr(model.config, "tie_word_embeddings", None)) is not None:
        values["tie_word_embeddings"] = tied
    known_names = (written,) if written == direct else (written, direct)
    return CompositeModel(json.loads(native), json.loads(json.dumps(values)), known_names, auto_class)


def _shapes(tensors: Mapping[str, Any]) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
