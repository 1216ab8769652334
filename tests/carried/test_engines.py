"""What serving engines such as vLLM ask of the code that a checkpoint carries, in addition to transformers."""

import ast
import inspect
import itertools
import json
import re
import textwrap
from typing import Any

import pytest
import torch
from carried.example_checkpoints import METHODS, imported
from pairs import by_default
from tiny import NATIVE_FAMILIES, prompt
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Methods whose memories can be served where requests lie in one row.
LOOK_AT_ONE_TOKEN = ("midus-hml", "midus-linear", "midus-pkm", "ultramem-v2")
# By default every family, whose layers make the calls, and the other methods on one.
SERVED = [(family, LOOK_AT_ONE_TOKEN[0]) for family in NATIVE_FAMILIES]
SERVED += [("llama", method) for method in LOOK_AT_ONE_TOKEN[1:]]
served = pytest.mark.parametrize(
    ("family", "method"), by_default(SERVED, itertools.product(NATIVE_FAMILIES, LOOK_AT_ONE_TOKEN))
)


def of_llama(module: Any, kind: str) -> Any:
    return getattr(module, f"MidusLlama{kind}")


# Memories that are inserted, that share tables, that fetch blocks, and that keep states.
@pytest.mark.parametrize("method", by_default(["midus-hml", "ultramem-v2", "hier-kv", "moc"], METHODS))
def test_model_takes_a_config_of_another_copy_of_its_code(method, checkpoints):
    """An engine sends the config to another process by value, where the model's own code is loaded from its file."""
    folder = checkpoints("llama", method)
    sent, own = imported(folder, "sent"), imported(folder, "own")
    configs = [of_llama(module, "Config").from_pretrained(folder) for module in (sent, own)]
    assert type(configs[0]) is not type(configs[1])
    models = [of_llama(own, "ForCausalLM").from_pretrained(folder, config=config).eval() for config in configs]
    with torch.no_grad():
        logits = [model(prompt()).logits for model in models]
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("engine", "method", "message"),
    [
        ("vllm", "moc", "keeps nothing for the memory 'chapters', .* expected midus-hf installed"),
        ("sglang", "engram", "keeps nothing for the memory 'ngram', .* expected midus-hf installed"),
        ("vllm", "packs", "attention 'vllm' exposes no log-sum-exp, .* expected midus-hf installed"),
    ],
)
def test_engines_refuse_memories_with_a_state(engine, method, message, checkpoints, monkeypatch):
    """An engine's Transformers backend sets attention of the engine's name in the config, and makes the model by it."""
    code = imported(folder := checkpoints("llama", method), "served")
    config = of_llama(code, "Config").from_pretrained(folder)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, engine, ALL_ATTENTION_FUNCTIONS["sdpa"])
    config._attn_implementation = engine
    with pytest.raises(ValueError, match=message):
        of_llama(code, "Model")(config)


def attention_calls(module: nn.Module) -> list[ast.Call]:
    """The calls in the source of a module's forward, of local names that were taken from `ALL_ATTENTION_FUNCTIONS`."""
    nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(type(module).forward)))))
    taken = {
        ast.unparse(target)
        for node in nodes
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and re.match(r"ALL_ATTENTION_FUNCTIONS[.\[]", ast.unparse(node.value or node.target))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    }
    return [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) in taken]


@served
def test_each_layer_has_one_call_of_the_attention_function(family, method, checkpoints):
    """vLLM reads the source of each forward, and gives a cache to each layer index of those in which it finds the call."""
    folder = checkpoints(family, method)
    code = imported(folder, "read")
    (model_class,) = [
        value for name, value in vars(code).items() if name.startswith("Midus") and name.endswith("ForCausalLM")
    ]
    model = model_class.from_pretrained(folder)
    attending = [module for module in model.modules() if len(attention_calls(module)) == 1]
    assert sorted(module.layer_idx for module in attending) == list(range(model.config.num_hidden_layers))
    for module in attending:
        (call,) = attention_calls(module)
        for keyword in call.keywords:
            if keyword.arg in ("scaling", "s_aux"):
                text = ast.unparse(keyword.value)
                assert isinstance(keyword.value, ast.Constant) or text.partition(".")[0] == "self", text


@served
def test_engine_arguments_reach_the_attention_of_every_layer(family, method, checkpoints, monkeypatch):
    """SGLang's Transformers backend passes a batch and attention by layer, which the attention function reads."""
    folder = checkpoints(family, method)
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    model = getattr(imported(folder, "sglang"), architecture).from_pretrained(folder).eval()
    assert model._supports_attention_backend
    reached = []

    def attention(module, query, key, value, _mask, forward_batch=None, attention_instances=None, **arguments):
        if attention_instances is not None:
            reached.append((module.layer_idx, forward_batch, attention_instances[module.layer_idx]))
        arguments.pop("softcap", None)  # which sdpa does not have
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, None, **arguments)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sglang", attention)
    model.config._attn_implementation = "sglang"
    layers = range(model.config.num_hidden_layers)
    passed = {"forward_batch": "batch", "attention_instances": {layer: f"attention {layer}" for layer in layers}}
    positions = torch.arange(prompt().shape[1])[None].expand_as(prompt())
    with torch.no_grad():
        expected = model(prompt()).logits
        output = model(input_ids=prompt(), position_ids=positions, use_cache=False, return_dict=False, **passed)
    assert torch.equal(output[0], expected)
    assert sorted(reached) == [(layer, "batch", f"attention {layer}") for layer in layers]
