"""Hooks by which memories act: what others do to their modules, and what a failed pass leaves."""

import copy
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from models.cases import CASES, GREEDY, chosen
from models.gradients import enable_checkpointing
from tiny import logits, prompt
from torch import nn

# Memories that change projections, heads, and what parts return; the last reads the depth through a cache that notes what it gets.
ROWS = ("hier-lora-qk", "hier-lora-ffn", "hier-kv", "hier-ffn", "token behind layers", "ultramem skip", "depth reused")
FAMILY = "gemma2"  # whose parts have norms behind them
on_rows = pytest.mark.parametrize("row", ROWS)


def logits_of(model, row):
    return logits(model, **CASES[row].given())


def layers_with_sites(model):
    return [layer for layer in model.model.layers if getattr(layer, "site_objects", None)]


@on_rows
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_memories_of_a_copy_are_those_of_the_copy(row, copied, shared_model):
    model = shared_model(row, FAMILY)
    before, other = logits_of(model, row), copied(model)
    assert torch.equal(logits_of(other, row), before)
    with torch.no_grad():
        for name, value in other.named_parameters():
            if ".memor" in name:
                value.zero_()
    assert torch.equal(logits_of(model, row), before)
    if not CASES[row].fetches:  # blocks of banks, which are no parameters, still act
        assert not torch.equal(logits_of(other, row), before)


def replaced(module):
    """A new module with the same weights, as quantisation and vLLM put in place of linear layers."""
    if isinstance(module, nn.Linear):
        made = nn.Linear(module.in_features, module.out_features, bias=False, dtype=module.weight.dtype)
    else:
        made = type(module)(len(module.weight)).to(module.weight.dtype)
    made.load_state_dict(module.state_dict())
    return made


def wrapped(module):
    """As adapters wrap linear layers, and copy modules that they save: a copy, which has the hooks too."""
    return nn.Sequential(copy.deepcopy(module))


@on_rows
@pytest.mark.parametrize("change", [replaced, wrapped])
def test_replaced_modules_run_hooks_once(row, change, tmp_path):
    model = CASES[row].model(FAMILY, tmp_path)
    before = logits_of(model, row)
    for layer in layers_with_sites(model):
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, change(child))
        layer.post_attention_layernorm = change(layer.post_attention_layernorm)
    assert torch.equal(logits_of(model, row), before)


@on_rows
def test_failed_pass_leaves_nothing(row, tmp_path, monkeypatch):
    model = CASES[row].model(FAMILY, tmp_path)
    before, layer = logits_of(model, row), layers_with_sites(model)[-1]
    with monkeypatch.context() as patched:
        patched.setattr(type(layer.mlp), "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            logits_of(model, row)
    assert all(layer.calls.current is None for layer in layers_with_sites(model))
    assert torch.equal(logits_of(model, row), before)


PARTS = {"hier-ffn": "mlp", "hier-lora-qk": "self_attn.q_proj", "hier-kv": "self_attn"}


@pytest.mark.parametrize(("row", "part"), PARTS.items())
def test_part_is_not_called_without_its_layer(row, part, shared_model):
    layer, read = layers_with_sites(shared_model(row, FAMILY))[-1], torch.zeros(1, 1, 32, dtype=torch.float64)
    positions = tuple(torch.ones(2, 1, 1, layer.self_attn.head_dim, dtype=torch.float64))
    given = {"position_embeddings": positions, "attention_mask": None} if part == "self_attn" else {}
    with pytest.raises(ValueError, match=rf"^a part of layer {layer.layer_idx} was called outside .* Call the layer"):
        layer.get_submodule(part)(read, **given)


@pytest.fixture
def switching_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(works):
    with ThreadPoolExecutor(len(works)) as pool:
        made = [pool.submit(lambda work=work: [work() for _ in range(4)]) for work in works]
        return [each.result() for each in made]


@pytest.mark.parametrize("row", chosen())
@pytest.mark.usefixtures("switching_often")
def test_threads_of_one_model_compute_what_one_thread_does(row, tmp_path):
    case = CASES[row]
    # These need three layers and four.
    model = case.model(FAMILY, tmp_path, small=row not in ("ultramem shared skip", "depth some"))
    texts = prompt(), prompt(seed=5)[:, :5]

    def passed(text):
        return logits(model, text, **case.given())

    def generated(text):
        made = model.generate(text, **GREEDY, output_logits=True, return_dict_in_generate=True, **case.given())
        return torch.stack(made.logits)

    works = [partial(run, text) for run in (passed, generated) for text in texts]
    for work, results in zip(works, in_threads(works), strict=True):
        expected = work()
        assert all(torch.equal(result, expected) for result in results)


@pytest.mark.usefixtures("switching_often")
def test_threads_that_find_a_part_replaced_give_it_one_hook(tmp_path):
    model = CASES["hier-ffn"].model(FAMILY, tmp_path)
    before = logits_of(model, "hier-ffn")
    for layer in layers_with_sites(model):
        layer.mlp = copy.deepcopy(layer.mlp)
        layer.mlp._forward_hooks.clear()
    for results in in_threads([partial(logits_of, model, "hier-ffn")] * 4):
        assert all(torch.equal(result, before) for result in results)
    assert {len(layer.mlp._forward_hooks) for layer in layers_with_sites(model)} == {1}


def attributes(model):
    held = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            inner = [*value, *value.values()] if isinstance(value, dict) else value
            held[name, key] = [value, *inner] if isinstance(value, dict | list | set) else [value]
    return held


def is_same(before, after):
    return before is after or (not isinstance(before, torch.Tensor) and before == after)


@pytest.mark.parametrize("checkpointed", [False, True])
@on_rows
def test_training_pass_changes_no_module_attribute(row, checkpointed, tmp_path):
    model = CASES[row].model(FAMILY, tmp_path).train()
    if checkpointed:
        enable_checkpointing(model, use_reentrant=False)
    tensors, before = {name: tensor.clone() for name, tensor in model.state_dict().items()}, attributes(model)
    model(prompt(), use_cache=False, **CASES[row].of_training(prompt())).loss.backward()
    after = attributes(model)
    assert {key: len(held) for key, held in before.items()} == {key: len(held) for key, held in after.items()}
    assert [key for key, held in before.items() if not all(map(is_same, held, after[key]))] == []
    own = {name for name, buffer in model.named_buffers() if name.endswith("_vector")}  # which training keeps
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items() if name not in own)
