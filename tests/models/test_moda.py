"""Models whose heads read the depth: what they compute and learn, and which attention they take."""

import re

import pytest
import torch
from models.depth_reference import add_depth
from models.gradients import check_close, gradients_of, loss_and_gradients
from models.hosting import host_of
from models.memory_models import DEPTHS, depth_model
from tiny import logits, prompt, tiny_model
from transformers import AutoModel, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from midus_hf.config.declared_tensors import ZEROS
from midus_hf.memories.module import MemoryModule

AUTO = (AutoModelForCausalLM, AutoModel)
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16}
# Families that differ (norms of queries and keys by head and whole, capped scores, two rotations), kinds and options: also the
# paper's model, which is the joint one, layers of one kind, and longer keys.
COMPARED = [
    *((family, kind, {}) for family in ("llama", "gemma3") for kind in DEPTHS),
    *((family, kind, {}) for family in ("qwen3", "gemma2", "olmo2") for kind in ("default", "reused", "projected")),
    *((family, "joint", {}) for family in ("qwen3", "olmo2")),
    *((family, "default", {"layers": [1, 3]}) for family in ("llama", "gemma3")),
    *(("qwen3", kind, {"base": {"rope_parameters": YARN}}) for kind in ("default", "projected")),
]


@pytest.mark.parametrize(("family", "kind", "options"), COMPARED, ids=str)
def test_logits_and_gradients_match_hooks_on_the_base(family, kind, options):
    model, tokens = depth_model(family, kind, **options), prompt()
    native = tiny_model(family, torch.float64, **(options.get("base") or {}))
    plain, owned, found = logits(native), add_depth(native, model), {}
    for name, each in (("expected", native), ("actual", model)):
        found[name] = each(tokens, labels=tokens, use_cache=False)
        found[name].loss.backward()
    expected, actual = (found[name].logits.detach() for name in ("expected", "actual"))
    # Norms, cosines, and the softmax of eager attention are in float32, whatever the model is in.
    assert (expected - plain).abs().max() > 1e-2
    assert (actual - expected).norm() < 1e-6 * expected.norm()
    gradients = {name: value.grad for name, value in [*native.named_parameters(), *owned.items()]}
    assert all(gradient.any() for gradient in gradients.values())
    check_close(gradients_of(model), gradients, 5e-6)


@pytest.mark.parametrize(("bound", "beyond", "inside"), [(0.0, -0.3, 1e-6), (1.0, 1.3, 1 - 1e-6)], ids=["0", "1"])
@pytest.mark.parametrize("kind", ["default", "reused"])
def test_gate_beyond_a_bound_has_the_gradient_that_leads_back(native_family, kind, bound, beyond, inside):
    model, name = depth_model(native_family, kind), "model.layers.2.memories.depth-attention.depth_gate"

    def at(value):
        with torch.no_grad():
            model.get_parameter(name).fill_(value)
        return logits(model), loss_and_gradients(model, prompt())[1][name]

    (at_bound, of_bound), (outside, of_outside), (_, free) = at(bound), at(beyond), at(inside)
    # At the bound as beyond it: what would lead inside is kept, what would lead further out is left out.
    assert torch.equal(outside, at_bound)
    assert torch.equal(of_outside, of_bound)
    back = free.clamp(max=0) if bound == 0 else free.clamp(min=0)
    torch.testing.assert_close(of_outside, back, rtol=1e-3, atol=1e-9)


def told(module, query, key, value, mask, *, scaling, **_):
    """Causal attention, and the logarithm of its sum, as `flex_attention` gives it on a GPU."""
    key, value = (part.repeat_interleave(module.num_key_value_groups, 1) for part in (key, value))
    ahead = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(1)
    scores = (query @ key.transpose(-1, -2) * scaling).masked_fill(ahead, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2), scores.logsumexp(-1)


def untold(*arguments, **named):
    return told(*arguments, **named)[0], None


def with_attention(model, name, function, monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, name, function)
    # That of flex_attention is compiled, which takes fifteen seconds.
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._local_mapping, name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.config._attn_implementation = name
    return model


REFUSED = ["flash_attention_2", "flash_attention_3", "paged|sdpa", "own"]
REMEDY = "exposes no log-sum-exp, which this memory needs; expected"


@pytest.mark.parametrize("name", [*REFUSED, "flex_attention"])
def test_attention_without_log_sum_exp_is_refused_in_a_pass(name, monkeypatch):
    # The first layer, which reads nothing of the depth, runs it.
    model = with_attention(depth_model("llama", dtype=torch.float32), name, untold, monkeypatch)
    where = " on cpu" if name == "flex_attention" else ""
    with pytest.raises(ValueError, match=re.escape(f"attention '{name}'{where} {REMEDY}")):
        logits(model)


@pytest.mark.parametrize("name", REFUSED)
def test_attention_without_log_sum_exp_is_not_set(family, name, tmp_path, monkeypatch):
    model = depth_model(family, dtype=torch.float32)
    if name == "own":
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, name, untold)
    before = model.config._attn_implementation
    model.save_pretrained(tmp_path)
    calls = [one.set_attn_implementation for one in (model, model.model)]
    if name == "flash_attention_2":
        calls += [lambda name, kind=kind: kind.from_pretrained(tmp_path, attn_implementation=name) for kind in AUTO]
    for call in calls:
        with pytest.raises(ValueError, match=re.escape(f"attention '{name}' {REMEDY}")):
            call(name)
    with pytest.raises(ValueError, match='Specified `attn_implementation="foo"` is not supported'):
        model.set_attn_implementation("foo")  # which the family refuses
    assert model.config._attn_implementation == model.model.config._attn_implementation == before


def test_vllm_cannot_make_the_model(monkeypatch):
    """Its Transformers backend sets attention of this name in the config, and makes the model by it."""
    config = depth_model("llama").config
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "vllm", untold)
    config._attn_implementation = "vllm"
    with pytest.raises(ValueError, match=f"attention 'vllm' {REMEDY} midus-hf installed beside vLLM"):
        AutoModel.from_config(config)
    config.memory = []
    AutoModel.from_config(config)


def test_log_sum_exp_of_flex_attention_is_used(monkeypatch):
    results = []
    for name in ("sdpa", "flex_attention"):
        model = depth_model("llama")
        if name == "flex_attention":
            with_attention(model, name, told, monkeypatch)
        loss, gradients = loss_and_gradients(model, prompt())
        results.append({"loss": loss, **gradients})
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-7)


def test_new_model_has_the_declared_initial_values(native_family):
    """Its first layer holds only linear layers."""
    native = tiny_model(native_family)
    model = host_of(native, {"type": "moda", "layers": [0, 1, 2]})
    fresh = type(model)(model.config)
    for memory in (module for module in fresh.modules() if isinstance(module, MemoryModule)):
        for name, tensor in memory.declared.items():
            assert (tensor.initial == ZEROS) == (not memory.declared_tensor(name).any())


@pytest.mark.parametrize("kind", [kind for kind in DEPTHS if kind not in ("joint", "added to reused")])
def test_depth_learns_through_values_and_gates_first(native_family, kind):
    model = depth_model(native_family, kind, torch.float32, acting=False)
    new = {name: value for name, value in model.train().named_parameters() if ".memories." in name}
    gates = {name for name in new if name.endswith("depth_gate")}
    is_added = not any(word in kind for word in ("reused", "attention"))
    values = {name for name in new if "_value" in name} if is_added else set()
    started = {name: value.detach().clone() for name, value in new.items()}
    optimizer, first = torch.optim.SGD(new.values(), lr=1.0), loss_and_gradients(model, prompt())[1]
    learn = {name for name in new if first[name].any()}
    assert values <= learn <= values | gates
    assert learn
    optimizer.step()
    with torch.no_grad():
        for name in gates:  # as optimisers do that step by the sign: every head begins somewhere
            new[name].copy_((new[name] + 0.1 * (new[name] == 0)).abs())
    second = loss_and_gradients(model, prompt())[1]
    assert all(second[name].any() for name in new)
    optimizer.step()
    assert not [name for name, value in new.items() if torch.equal(value, started[name])]
