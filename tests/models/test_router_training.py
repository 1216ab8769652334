"""Losses of routers in the loss of a model: when they are added, of what tokens, and the same however a step is cut."""

import inspect
from functools import partial

import pytest
import torch
from models.gradients import enable_checkpointing
from models.memory_models import chapter_entry, chapter_model
from models.upscaled import upscaled_model
from tiny import prompt
from transformers import PreTrainedModel

from midus_hf.memories.hosting.parts import CACHE
from midus_hf.memories.hosting.service import RouterReports

COEFFICIENTS = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.01}
TOKENS = 8


def labels_of(tokens: torch.Tensor, prompt_length: int = 2) -> torch.Tensor:
    labels = tokens.clone()
    labels[:, :prompt_length] = -100
    return labels


def model_with(**options) -> PreTrainedModel:
    return chapter_model(**{**COEFFICIENTS, **options})


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, **how) -> float:
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), **how
    ).item()


def test_loss_adds_the_mean_of_each_memory_s_routers(native_family):
    """tests/memory/test_router_losses.py has what a router tells; here each is asked again for what it read."""
    behind_layers = {"routing": "token", "site": "behind-layer"}
    memory = [chapter_entry(**COEFFICIENTS), chapter_entry("chapters-2", (0, 1, 2), **behind_layers, **COEFFICIENTS)]
    model = chapter_model(native_family, memory=memory).train()
    told: dict[str, list[float]] = {"chapters": [], "chapters-2": []}

    def ask_again(name, memory, arguments, inputs):
        reports = RouterReports()
        type(memory).forward(memory, *arguments, **{**inputs, "report": partial(reports.store, name, 0)})
        told[name].append(reports.loss().item())

    for layer in model.model.layers:
        for name, module in getattr(layer, "memories", {}).items():
            module.register_forward_pre_hook(lambda *read, name=name: ask_again(name, *read), with_kwargs=True)
    labels = labels_of(prompt(TOKENS))
    output = model(prompt(TOKENS), labels=labels, use_cache=False, output_router_logits=True)
    assert [len(logits) for logits in output.router_logits] == [16, 5, 16, 16, 5], "by layer, and then by name"
    added = sum(sum(losses) / len(losses) for losses in told.values())
    assert added > 0.1
    assert output.aux_loss.item() == pytest.approx(added, rel=1e-6)
    assert output.loss.item() == pytest.approx(cross_entropy(output.logits, labels) + added, rel=1e-6)


# Whether the model trains, what a pass asks for and what the config says, and whether losses are added and given.
WHEN = [
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
]


@pytest.mark.parametrize(("training", "summary", "in_config", "adds", "gives"), WHEN)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
def test_router_losses_are_added_and_given_when_asked(training, summary, in_config, adds, gives, grad):
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


@pytest.mark.parametrize("training", [True, False])
def test_tuple_has_the_loss_first_and_logits_after_it(training):
    model, given = model_with().train(training), {"labels": labels_of(prompt(TOKENS)), "use_cache": False}
    named, in_order = model(prompt(TOKENS), **given), model(prompt(TOKENS), **given, return_dict=False)
    assert isinstance(in_order, tuple) and torch.equal(in_order[0], named.loss)
    assert any(torch.equal(value, named.logits) for value in in_order[1:] if isinstance(value, torch.Tensor))


def test_reentrant_activation_checkpointing_is_refused():
    model = model_with().train()
    enable_checkpointing(model, use_reentrant=True)
    with pytest.raises(ValueError, match=r"expected gradient_checkpointing_kwargs=\{'use_reentrant': False\}\."):
        model(prompt(TOKENS), labels=prompt(TOKENS), use_cache=False)
    model(prompt(TOKENS), labels=prompt(TOKENS), use_cache=False, output_router_logits=False).loss.backward()


def test_router_losses_are_shared_by_tokens_of_a_step():
    """With `num_items_in_batch`, cross entropy is divided by the tokens of the step; a router's loss is its mean over tokens."""
    model, labels = model_with().train(), labels_of(prompt(TOKENS))
    labels[1, :6] = -100
    for row, tokens in enumerate((6, 2)):
        of_row = labels[row : row + 1]
        output = model(prompt(TOKENS)[row : row + 1], labels=of_row, num_items_in_batch=torch.tensor(6 + 2))
        expected = cross_entropy(output.logits, of_row, reduction="sum") / 8 + tokens / 8 * output.aux_loss.item()
        assert output.loss.item() == pytest.approx(expected, rel=1e-6)


def test_model_without_routers_takes_no_such_option_further():
    model = upscaled_model("llama")
    output = model(prompt(TOKENS), labels=prompt(TOKENS), output_router_logits=True)
    assert output.loss.item() == pytest.approx(cross_entropy(output.logits, prompt(TOKENS)), rel=1e-5)
    assert "router_logits" not in output


def test_trainer_keeps_router_columns_and_no_router_outputs():
    model = model_with()
    names = set(inspect.signature(model.forward).parameters)
    assert {"input_ids", "labels", "token_mask", "output_router_logits"} <= names
    assert {*model.config.keys_to_ignore_at_inference} == {CACHE, "router_logits", "aux_loss"}


def test_training_without_labels_warns_of_router_losses():
    model = model_with().train()
    with pytest.warns(UserWarning, match="has no labels, so the losses of its routers are not added"):
        plain = model(prompt(TOKENS))
    assert plain.loss is None and "router_logits" not in plain
    for training in (True, False):
        output = model.train(training)(prompt(TOKENS), output_router_logits=True)
        assert output.loss is None and output.aux_loss.requires_grad and len(output.router_logits) == 2
