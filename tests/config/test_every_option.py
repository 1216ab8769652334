"""Every option is held to its type and its least value, with one message."""

import dataclasses
import math
import re
import typing

import pytest

from midus_hf.compare.plan import Comparison, TaskOptions, VariantOptions
from midus_hf.config.options import alternatives_of
from midus_hf.config.yaml_options import from_mapping
from midus_hf.evaluation.evaluate import EvaluationSettings
from midus_hf.memories.registry import MEMORY_TYPES
from midus_hf.training.arguments import TrainArguments
from midus_hf.training.keys import Rates
from midus_hf.training.sft.run import SftArguments
from upscalers.methods.contract import METHODS, get_method
from upscalers.request import Request

get_method("midus-hml")  # all methods are registered with the first one
OPTIONS = {f"memory {name}": options for name, options in MEMORY_TYPES.items()}
OPTIONS |= {f"method {name}": method.options_class for name, method in METHODS.items()}
OTHERS = (Request, EvaluationSettings, Comparison, TaskOptions, VariantOptions, TrainArguments, SftArguments, Rates)
OPTIONS |= {options.__name__: options for options in OTHERS}
# What an option needs in addition to be read.
NEEDED = {
    EvaluationSettings: {"text": "a.txt", "tasks": ["piqa"]},
    Comparison: {"base": "a", "output_dir": "b", "train": {}, "variants": {}}, TrainArguments: {"corpus": "a.txt"},
    Request: {"base": "a", "method": "a"}, SftArguments: {"dataset_name": "a"}, TaskOptions: {"names": ["a"]},
}  # fmt: skip
WORDS, LIST, MAPPING = "no such value", [{"no": 1}], {"no such key": 1}
# Values that each type refuses.
WRONG = {
    int: [WORDS, LIST, MAPPING, True, 1.5, math.inf], float: [WORDS, LIST, MAPPING, True, math.nan],
    bool: [WORDS, LIST, MAPPING, 1], str: [LIST, MAPPING, True, 1.5], list: [WORDS, MAPPING, True, 1.5],
    dict: [WORDS, LIST, True, 1.5], typing.Literal: [WORDS, LIST, MAPPING, 1.5],
    type(None): [WORDS, LIST, MAPPING, True, 1, 1.5, math.nan, math.inf],
}  # fmt: skip
# The least value of each number, and those above which it has to be.
LEAST = {
    2: "branching chunk_size TrainArguments.sequence_length",
    1: "batch_size chapters epochs hash_heads heads hidden_size k limit max_tokens memory_tokens n open rank rows sequence_length "
    "slots width",
    0: "base_kl distance eval_share generic_share kernel known_ngrams known_tokens norm_weight num_fewshot row_dropout "
    "router_aux_loss_coef router_z_loss_coef shared_chapters shuffle_buffer value_weight_decay weight_decay",
}
LEAST = {name: least for least, names in LEAST.items() for name in names.split()}
ABOVE_0 = "alpha key_value_learning_rate learning_rate max_iterations memory_learning_rate regularization routed_scale".split()
ABOVE_0 += ["gain_learning_rate", "tolerance", "value_learning_rate"]
# Numbers that other options, the model or the request bound, and those of the Trainer.
BOUND_BY_OTHERS = "key_width max_order min_documents min_order num_new_layers pre_value_width seed".split()
BOUND_BY_OTHERS += ["max_shard_size", "placement", "span", "value_width"]
UNBOUND = ["chat_score_bias", "score_bias"]


def fields_of(options: type) -> dict[str, tuple]:
    hints, of_the_trainer = typing.get_type_hints(options), set()
    for parent in options.__mro__:
        if parent.__module__.startswith(("transformers", "trl")):
            of_the_trainer |= {field.name for field in dataclasses.fields(parent)}
    names = [field.name for field in dataclasses.fields(options) if field.name not in of_the_trainer]
    return {name: alternatives_of(hints[name]) for name in names}


def refusal_of(options: type, values: dict[str, object]) -> str:
    try:
        from_mapping(options, {**NEEDED.get(options, {}), **values})
    except ValueError as refused:
        return str(refused)
    return ""


def wrong_values(alternatives: tuple) -> list:
    refused = [WRONG.get(typing.get_origin(each) or each, []) for each in alternatives]
    return [value for value in refused[0] if all(any(value is other for other in values) for values in refused)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_value_of_another_type_is_refused(options):
    for name, alternatives in fields_of(options).items():
        for value in wrong_values(alternatives):
            said, pattern = (
                refusal_of(options, {name: value}),
                rf"{name}\S* is {re.escape(repr(value))}; expected [^\n]+\.$",
            )
            assert re.match(pattern, said), (name, value, said)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_number_below_its_minimum_is_refused(options):
    for name, alternatives in fields_of(options).items():
        if not {int, float} & {*alternatives} or name in BOUND_BY_OTHERS + UNBOUND:
            continue
        assert (name in LEAST) != (name in ABOVE_0), f"say the least value of {name} above"
        least = LEAST.get(f"{options.__name__}.{name}", LEAST.get(name))
        bound = "above 0" if least is None else "1|one" if least == 1 else str(least)
        below, taken = (0, 1) if least is None else (least - 1, least)
        said, other = (refusal_of(options, {name: value}) for value in (below, taken))
        pattern = rf"(\w+ is [^;]+ and |tasks: )?{name} (is )?{below}(\.0)?( and [^;]+)?; expected [^\n]*\b({bound})\b[^\n]*\.$"
        assert re.match(pattern, said), (name, said)
        assert other.partition("; ")[2] != said.partition("; ")[2], (name, said)
