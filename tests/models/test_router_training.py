"""Losses of routers in the loss of a model: when they are added, of what tokens, and the same however a step is cut."""

import inspect
import math

import pytest
import torch
from models.chapter_models import chapter_model, entry, memories_of
from models.gradients import enable_checkpointing
from models.upscaled import upscaled_model
from tiny import prompt
from transformers import DynamicCache, PreTrainedModel

from midus_hf.memories.hosting.parts import CACHE

ROUTINGS = ("chunk", "token", "sequence")
COEFFICIENTS = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.01}
TOKENS, CHUNK = 8, 3


def labels_of(tokens: torch.Tensor, prompt_length: int = 2) -> torch.Tensor:
    labels = tokens.clone()
    labels[:, :prompt_length] = -100
    return labels


def model_with(routing: str = "chunk", **options) -> PreTrainedModel:
    return chapter_model(routing=routing, **{**COEFFICIENTS, **options})


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, **how) -> float:
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), **how
    ).item()


def router_loss(router_logits: torch.Tensor, stretches: list[int], shared: int = 1, k: int = 2) -> float:
    """The loss of one router over the chapters that it chooses among, of the tokens of its stretches, by loops."""
    router_logits = router_logits[:, shared:]
    chapters, tokens = router_logits.shape[-1], sum(stretches)
    frequency, probability, squares = [0.0] * chapters, [0.0] * chapters, 0.0
    for logits, size in zip(router_logits.tolist(), stretches, strict=True):
        total = sum(map(math.exp, logits))
        squares += size / tokens * math.log(total) ** 2
        for chapter in sorted(range(chapters), key=lambda chapter, logits=logits: -logits[chapter])[:k]:
            frequency[chapter] += size / tokens
        for chapter in range(chapters):
            probability[chapter] += size / tokens * math.exp(logits[chapter]) / total
    balance = chapters * sum(f * p for f, p in zip(frequency, probability, strict=True))
    return COEFFICIENTS["router_aux_loss_coef"] * balance + COEFFICIENTS["router_z_loss_coef"] * squares


def stretches_of(routing: str, batch: int = 2) -> list[int]:
    """Tokens of each stretch: the beginnings of all rows are one, before the chunks of each."""
    if routing == "chunk":
        return [batch * CHUNK, *[CHUNK, TOKENS - 2 * CHUNK] * batch]
    return ([1] * TOKENS if routing == "token" else [TOKENS]) * batch


@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_loss_is_cross_entropy_and_the_mean_of_the_routers(native_family, routing):
    model = chapter_model(native_family, routing=routing, **COEFFICIENTS).train()
    labels = labels_of(prompt(TOKENS))
    output = model(prompt(TOKENS), labels=labels, output_router_logits=True)
    assert len(output.router_logits) == 2
    added = sum(router_loss(logits, stretches_of(routing)) for logits in output.router_logits) / 2
    assert added > 0.1
    assert output.aux_loss.item() == pytest.approx(added, rel=1e-6)
    assert output.loss.item() == pytest.approx(cross_entropy(output.logits, labels) + added, rel=1e-6)


@pytest.mark.parametrize(
    ("training", "summary", "in_config", "adds", "gives"),
    [
        (True, None, None, True, False),
        (True, True, None, True, True),
        (True, False, None, False, False),
        (True, None, True, True, True),
        (True, None, False, False, False),
        (True, True, False, True, True),
        (True, False, True, False, False),
        (False, None, None, False, False),
        (False, True, None, True, True),
        (False, None, True, True, True),
        (False, False, True, False, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
def test_when_they_are_added_and_given(training, summary, in_config, adds, gives, grad):
    model, labels = model_with().train(training), labels_of(prompt(TOKENS))
    if in_config is not None:
        model.config.output_router_logits = in_config
    with torch.set_grad_enabled(grad):
        output = model(prompt(TOKENS), labels=labels, output_router_logits=summary)
    adds = adds and (grad or gives)  # a pass without gradients trains nothing
    plain = cross_entropy(output.logits, labels)
    assert (output.loss.item() > plain + 0.1) == adds
    if not adds:
        assert output.loss.item() == pytest.approx(plain, rel=1e-6)
    assert (getattr(output, "router_logits", None) is not None) == gives
    assert (getattr(output, "aux_loss", None) is not None) == adds


def test_without_labels_there_are_logits_and_no_loss():
    output = model_with()(prompt(TOKENS), output_router_logits=True)
    assert output.loss is None and output.aux_loss is not None and len(output.router_logits) == 2
    plain = model_with().train()(prompt(TOKENS))
    assert plain.loss is None and "router_logits" not in plain


@pytest.mark.parametrize("training", [True, False])
def test_a_tuple_has_the_loss_first_and_logits_behind_it(training):
    model, labels = model_with().train(training), labels_of(prompt(TOKENS))
    named = model(prompt(TOKENS), labels=labels, use_cache=False)
    in_order = model(prompt(TOKENS), labels=labels, use_cache=False, return_dict=False)
    assert isinstance(in_order, tuple)
    assert torch.equal(in_order[0], named.loss)
    assert any(torch.equal(value, named.logits) for value in in_order[1:] if isinstance(value, torch.Tensor))


def test_reentrant_activation_checkpointing_is_refused():
    model = model_with().train()
    enable_checkpointing(model, use_reentrant=True)
    with pytest.raises(ValueError, match=r"expected gradient_checkpointing_kwargs=\{'use_reentrant': False\}\."):
        model(prompt(TOKENS), labels=prompt(TOKENS), use_cache=False)
    model(prompt(TOKENS), labels=prompt(TOKENS), use_cache=False, output_router_logits=False).loss.backward()


def test_passes_of_one_step_share_the_losses_of_routers_by_their_tokens():
    """With `num_items_in_batch`, cross entropy is divided by the tokens of the step; a router's loss is its mean over tokens."""
    model = model_with().train()
    rows, labels = prompt(TOKENS), labels_of(prompt(TOKENS))
    labels[1, :6] = -100
    num_items = (labels[:, 1:] != -100).sum()
    assert num_items == 6 + 2
    total = 0.0
    for row, share in ((slice(0, 1), 6 / 8), (slice(1, 2), 2 / 8)):
        output = model(rows[row], labels=labels[row], num_items_in_batch=num_items, output_router_logits=True)
        added = sum(router_loss(logits, stretches_of("chunk", 1)) for logits in output.router_logits) / 2
        expected = cross_entropy(output.logits, labels[row], reduction="sum") / 8 + share * added
        assert output.loss.item() == pytest.approx(expected, rel=1e-6)
        assert output.aux_loss.item() == pytest.approx(added, rel=1e-6)
        total += output.loss.item()
    # The squared log-sum-exp is a mean over tokens, and so are both passes together; balance is not, but near.
    whole = model(rows, labels=labels, num_items_in_batch=num_items).loss.item()
    assert total == pytest.approx(whole, rel=0.2)


def test_two_memories_add_the_loss_of_each():
    memory = [
        entry(**COEFFICIENTS),
        entry("chapters-2", (0, 1, 2), routing="token", site="behind-layer", **COEFFICIENTS),
    ]
    model = chapter_model(memory=memory).train()
    labels = labels_of(prompt(TOKENS))
    output = model(prompt(TOKENS), labels=labels, output_router_logits=True)
    assert [len(logits) for logits in output.router_logits] == [16, 5, 16, 16, 5], "by layer, and then by name"
    by_memory = {"chunk": (1, 4), "token": (0, 2, 3)}
    added = sum(
        sum(router_loss(output.router_logits[position], stretches_of(routing)) for position in places) / len(places)
        for routing, places in by_memory.items()
    )
    assert output.loss.item() == pytest.approx(cross_entropy(output.logits, labels) + added, rel=1e-6)


def test_a_model_without_routers_takes_no_such_option_further():
    model = upscaled_model("llama")
    output = model(prompt(TOKENS), labels=prompt(TOKENS), output_router_logits=True)
    assert output.loss.item() == pytest.approx(cross_entropy(output.logits, prompt(TOKENS)), rel=1e-5)
    assert "router_logits" not in output


def test_a_trainer_keeps_the_columns_that_routers_read():
    names = set(inspect.signature(model_with().forward).parameters)
    assert {"input_ids", "labels", "token_mask", "output_router_logits"} <= names


def test_a_pass_that_trains_without_labels_says_what_is_missing():
    tokens = prompt(TOKENS)
    with pytest.warns(UserWarning, match="has no labels, so the losses of its routers are not added"):
        model_with("chunk").train()(tokens)
    output = model_with("chunk").train()(tokens, output_router_logits=True)
    assert output.loss is None and output.aux_loss.requires_grad


def test_a_cache_in_training_is_left_alone_under_activation_checkpointing():
    """Which would repeat a layer with what it kept of the pass itself."""
    tokens, gradients = prompt(TOKENS), []
    for checkpointed in (False, True):
        model = model_with("chunk").train()
        if checkpointed:
            enable_checkpointing(model, use_reentrant=False)
        model(tokens, labels=tokens, **{CACHE: DynamicCache() if checkpointed else None}).loss.backward()
        gradients.append(memories_of(model)[0].router_weight.grad)
    torch.testing.assert_close(*gradients)
