"""How important heads are for answers: by definition, in every family, and with memories that start at the base."""

import dataclasses
import json

import pytest
import torch
from look.upscaled_folders import loaded, saved_pair
from models.pack_models import pack_model
from tiny import tiny_model
from training.tiny_run import refused

from midus_hf.look.heads import Answer, head_importance, heads_rows, heads_table
from midus_hf.memories.hosting.layer import without_memories

ANSWERS = [Answer(torch.tensor([5, 9, 33, 60, 7]), 3), Answer(torch.tensor([12, 40, 41]), 1)]


def by_definition(model, answer: Answer) -> torch.Tensor:
    """Absolute sums over tokens, `[L, H]`, from a gate of one on what each head gives at each token."""
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    gates = torch.ones(layers, heads, len(answer.ids), dtype=torch.float64, requires_grad=True)

    def gated(layer):
        def hook(module, arguments):
            (read,) = arguments
            if not torch.is_grad_enabled():  # in the pass over an entry's text
                return None
            return ((read.unflatten(-1, (heads, -1)) * gates[layer].T[None, :, :, None]).flatten(-2),)

        return hook

    parts = [layer.self_attn.o_proj for layer in model.model.layers]
    handles = [part.register_forward_pre_hook(gated(index)) for index, part in enumerate(parts)]
    logits = model(answer.ids.unsqueeze(0)).logits[0]
    chosen = logits.log_softmax(-1)[torch.arange(len(answer.ids) - 1), answer.ids[1:]]
    loss = -chosen[answer.prompt_tokens - 1 :].sum()
    (slopes,) = torch.autograd.grad(loss, gates)  # d loss / d gate = a . d loss / d a where the gate is one
    for handle in handles:
        handle.remove()
    return slopes.abs().sum(-1)


def test_head_importance_is_the_gradient_of_a_gate(family):
    model = tiny_model(family, torch.float64).eval()
    model.model.layers[0].requires_grad_(False)
    before = [parameter.requires_grad for parameter in model.parameters()]
    result = head_importance(model, ANSWERS)
    assert [parameter.requires_grad for parameter in model.parameters()] == before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(layer.self_attn.o_proj._forward_pre_hooks for layer in model.model.layers)
    absolute = sum(by_definition(model, answer) for answer in ANSWERS)
    tokens = torch.full((model.config.num_hidden_layers, 1), float(sum(len(answer.ids) - 1 for answer in ANSWERS)))
    tokens[-1] = sum(len(answer.ids) - answer.prompt_tokens for answer in ANSWERS)
    torch.testing.assert_close(result.absolute, absolute / tokens, rtol=1e-5, atol=1e-9)
    assert (result.answers, result.layers, result.base_layers) == (2, [0, 1, 2, 3], [0, 1, 2, 3])


def test_opened_packs_count_for_heads():
    model = pack_model("llama", torch.float64)
    result = head_importance(model, ANSWERS)
    absolute = sum(by_definition(model, answer) for answer in ANSWERS)
    torch.testing.assert_close(result.absolute[:3] * 6, absolute[:3])
    with without_memories(model.model.layers, ["packs"]):
        assert not torch.allclose(head_importance(model, ANSWERS).absolute, result.absolute)


def test_memory_at_the_base_leaves_heads_as_important():
    before, after = (head_importance(loaded(folder), ANSWERS) for folder in saved_pair("llama", "midus-hml"))
    assert (after.layers, after.base_layers) == ([0, 2, 3, 5], [0, 1, 2, 3]), "memories read heads as they are"
    torch.testing.assert_close(after.absolute, before.absolute, rtol=1e-4, atol=1e-8)
    assert after.loss == pytest.approx(before.loss)


@pytest.mark.parametrize("prompt_tokens", [0, 3, None])
def test_unmeasurable_answers_are_refused(prompt_tokens):
    answers = [] if prompt_tokens is None else [Answer(torch.tensor([3, 4, 5]), prompt_tokens)]
    some = f"an answer has 3 tokens, {prompt_tokens} of them in the prompt; expected some"
    with refused(some if answers else "there is no answer to measure; expected one or more"):
        head_importance(tiny_model("llama"), answers)


def test_heads_report_has_every_number():
    result = head_importance(tiny_model("llama").eval(), ANSWERS)
    rows, scores = json.loads(json.dumps(heads_rows("a", result))), result.absolute
    assert torch.tensor([row["importance"] for row in rows], dtype=torch.float64).equal(scores)
    assert [row["variance"] for row in rows] == pytest.approx(scores.var(dim=1, correction=0).tolist())
    best = int(scores[2].argmax())
    assert heads_table("a", rows).rows[2][4:] == [str(best), f"{scores[2, best]:.4g}"]
    other = heads_rows("b", dataclasses.replace(result, base_layers=[0, 2, 3, 4]))
    assert heads_table("b", other).rows[2][:2] == ["2", "3"]
