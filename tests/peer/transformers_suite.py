"""Transformers' own tests of models, run on classes of ours: `make test-peer`.

The source distribution of Transformers has its common tests of models, but not those of generation, export and causal language
models. They run too with `make test-peer TRANSFORMERS_SOURCE=FOLDER`, where the folder is a checkout of the installed version.
"""

import os
import sys
import types
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models.cases import CASES
from tiny import tiny_model
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

import tests
from midus_hf.models.families import HEAD_KINDS
from midus_hf.models.language_model import list_model

SOURCE = Path(os.environ.get("TRANSFORMERS_SOURCE", ""))
if not (SOURCE / "tests" / "test_modeling_common.py").is_file():
    raise pytest.UsageError(
        f"TRANSFORMERS_SOURCE is '{SOURCE}', which has no tests/test_modeling_common.py; expected a checkout of transformers "
        f"{transformers.__version__}, or its unpacked source distribution, which `make test-peer` fetches without the variable."
    )
tests.__path__ = [str(SOURCE / "tests"), *tests.__path__]


def _mixin(module: str, name: str) -> Any:
    """Return a mixin of Transformers' tests; one without tests in place of a mixin that the folder lacks."""
    if not Path(SOURCE, *module.split(".")).with_suffix(".py").is_file():
        LACKING.append(name)
        sys.modules[module] = types.ModuleType(module)
        setattr(sys.modules[module], name, type(name, (), {}))
    return getattr(__import__(module, fromlist=[name]), name)


LACKING: list[str] = []
_mixin("tests.exporters.test_export", "ExportTesterMixin")
GenerationTesterMixin = _mixin("tests.generation.test_utils", "GenerationTesterMixin")
ModelTesterMixin = _mixin("tests.test_modeling_common", "ModelTesterMixin")
CausalLMModelTest = _mixin("tests.causal_lm_tester", "CausalLMModelTest")
MIXINS = (ModelTesterMixin, GenerationTesterMixin) if LACKING else (CausalLMModelTest,)

#: The family's own classes, to compare with, and for each method a row of `tests/models/cases.py`.
METHODS = {
    "native": "",
    "midus-hml": "midus-hml",
    "moc": "chunk",
    "ultramem-v2": "ultramem own",
    "moda": "depth default",
    "engram": "ngram",
}

_LAYERS = ("dict_outputs_use_cache", "with_static_cache", "compilation_all_outputs", "past_key_values_format")
_STATE = "a memory that keeps a state of a sequence has a layer of its cache"
#: Tests that do not run, by method and a part of their names: what is refused by design.
SKIPPED: dict[str, dict[str, str]] = {
    "midus-hml": {"num_layers_is_small": "the layer inserted for the memory is one more than the base's two"},
    "moc": {
        "use_reentrant_true": "routers with losses refuse reentrant checkpointing",
        "assisted_decoding": "a sum over tokens cannot take tokens back",
        **dict.fromkeys(_LAYERS, _STATE),
    },
    "engram": {
        "inputs_embeds": "what reads input_ids refuses embeddings alone",
        **dict.fromkeys(("assisted_decoding", *_LAYERS), _STATE),
    },
}
_OF_ALL = {"inherits_generation_mixin": "it looks at a class's own bases, and the family's class has the mixin"}


class Tester:
    """Sizes, config and inputs of one family with one method, as the mixins ask for them."""

    batch_size, seq_length, is_training, num_labels, type_sequence_label_size = 3, 7, True, 3, 2

    def __init__(self, parent: Any, config: Any, classes: dict[str, type]):
        self.parent, self._config, self.config_class = parent, config, type(config)
        self.base_model_class, self.causal_lm_class = classes["Model"], classes["ForCausalLM"]
        self.sequence_classification_class, self.token_classification_class, self.question_answering_class = (
            classes.get(kind) for kind in HEAD_KINDS
        )
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            setattr(self, name, getattr(config, name))

    def get_config(self) -> Any:
        return type(self._config).from_dict(self._config.to_dict())

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        tokens = torch.randint(3, self.vocab_size, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens).tril()}


def _classes(family: str, method: str) -> tuple[Any, dict[str, type]]:
    """Return the config of a family's model, and its classes by the ends of their names."""
    if METHODS[method]:
        model: Any = CASES[METHODS[method]].model(family, Path(), torch.float32, small=True)
    else:
        model = tiny_model(family, num_hidden_layers=2)
    classes = {"Model": type(model.model), "ForCausalLM": type(model)}
    MODEL_MAPPING_NAMES.setdefault(model.config.model_type, classes["Model"].__name__)  # a stack alone is not trained
    for kind in HEAD_KINDS:
        mapping = getattr(transformers, f"AutoModel{kind}")._model_mapping
        if type(model.config) in mapping:
            classes[kind] = mapping[type(model.config)]
            # As its first model would: a test makes labels for what is listed before it makes a model.
            list_model(classes[kind])
    return model.config, classes


def _test_class(family: str, method: str) -> type:
    config, classes = _classes(family, method)

    def set_up(test: Any) -> None:
        transformers.logging.set_verbosity_warning()  # tests read what is logged
        test.model_tester, test.all_model_classes = Tester(test, config, classes), list(classes.values())
        if not LACKING:
            test.config_tester = _mixin("tests.test_configuration_common", "ConfigTester")(
                test, config_class=type(config)
            )

    members = {
        "test_can_init_all_missing_weights_before_2023": True,
        "setUp": set_up,
        "pipeline_model_mapping": {},
        "__module__": __name__,
    }
    for part, reason in ({**_OF_ALL, **SKIPPED.get(method, {})} if METHODS[method] else {}).items():
        tests_of_part = (name for mixin in MIXINS for name in dir(mixin) if name.startswith("test_") and part in name)
        members |= dict.fromkeys(tests_of_part, unittest.skip(reason)(lambda self: None))
    members["test_model"] = None  # of shapes alone, for testers of one class
    return type(f"Test_{family}_{method}".replace("-", "_"), (*MIXINS, unittest.TestCase), members)


for _family in ("llama", "qwen3", "gemma3"):
    for _method in METHODS:
        _made = _test_class(_family, _method)
        globals()[_made.__name__] = _made
del _made  # or it would be collected a second time


@pytest.mark.skipif(
    bool(LACKING), reason=f"{SOURCE} lacks {', '.join(LACKING)}; TRANSFORMERS_SOURCE=CHECKOUT has them"
)
def test_all_mixins_of_transformers_ran():
    pass
