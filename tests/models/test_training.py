"""Laws of gradients over one table (cases.py), losses of routers, and memories that draw slots."""

import inspect
import itertools
from functools import partial

import pytest
import torch
from models.cases import CASES, CHAPTERS, INSERTED, chosen, chosen_in_turn
from models.gradients import check_close, enable_checkpointing, gradients_of, loss_and_gradients
from models.memory_models import chapter_entry, chapter_model, ultramem_model
from models.upscaled import upscaled_model
from pairs import by_default
from tiny import logits, prompt, tiny_model
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from midus_hf.memories.decode_cache import decode_cache
from midus_hf.memories.hierarchical.training import train_blocks
from midus_hf.memories.hosting.parts import CACHE
from midus_hf.memories.hosting.service import RouterReports
from midus_hf.memories.module import MemoryModule

# How far sums in another order may be apart, by norms.
RELATIVE = {torch.float32: 1e-4, torch.float64: 1e-9}


def trained(case, family, folder, dtype=None):
    model = CASES[case].model(family, folder, dtype).train()
    if model.banks is not None:
        train_blocks(model.banks)
    return model


def new_parameters(model):
    entries = [entry for entry in model.config.memories().entries if entry.site == "inserted"]
    inserted = tuple(f"model.layers.{layer}." for entry in entries for layer in entry.layers)
    return {name for name, _ in model.named_parameters() if ".memor" in name or name.startswith(inserted)}


# By default each case with one kind of checkpointing, in turn where it takes both.
CHECKPOINTED = [(name, number % 2 == 1 and case.is_reentrant) for number, (name, case) in enumerate(CASES.items())]
ALSO_CHECKPOINTED = [(name, not kind) for name, kind in CHECKPOINTED if CASES[name].is_reentrant]
CHOSEN = [(name, kind) for name, kind in CHECKPOINTED if name in chosen()]


@pytest.mark.parametrize(("case", "use_reentrant"), by_default(CHOSEN, CHECKPOINTED + ALSO_CHECKPOINTED))
def test_checkpointing_changes_no_loss_and_no_gradient(native_family, case, use_reentrant, tmp_path):
    """Also with a frozen base, for which reentrant checkpointing needs an input that trains."""
    model, arguments, passes = trained(case, native_family, tmp_path), CASES[case].of_training(prompt()), []
    new = new_parameters(model)

    def learnt(frozen):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not frozen or name in new)
        return loss_and_gradients(model, prompt(), **arguments)

    freezes = [False] if use_reentrant or not new else [False, True]
    expected = [learnt(frozen) for frozen in freezes]
    assert {name for name in expected[0][1] if isinstance(name, str)} == {name for name, _ in model.named_parameters()}
    of_blocks = 4 * CASES[case].fetches  # those that were fetched
    assert len(expected[0][1]) == len(list(model.parameters())) + of_blocks
    for _, gradients in expected[1:]:
        assert {name for name in gradients if isinstance(name, str)} == new
    assert all(gradients[name].any() for _, gradients in expected for name in new)
    seen = model.model.layers[1].self_attn.q_proj  # of the tokens, while packs read their texts in passes of their own
    seen.register_forward_pre_hook(lambda _, given: passes.append(given[0].shape[:2]))
    enable_checkpointing(model, use_reentrant)
    for frozen, (loss, gradients) in zip(freezes, expected, strict=True):
        passes.clear()
        again, actual = learnt(frozen)
        assert torch.equal(again, loss)
        assert passes.count(prompt().shape) == 2
        if CASES[case].dtype == torch.float32 and not frozen:
            assert actual.keys() == gradients.keys()
            assert all(torch.equal(actual[name], gradient) for name, gradient in gradients.items())
        else:
            check_close(actual, gradients, RELATIVE[CASES[case].dtype])


def test_config_enables_checkpointing_in_every_layer(family):
    config = upscaled_model(family).config
    for auto in (AutoModel, AutoModelForCausalLM):
        config.gradient_checkpointing = True
        model = auto.from_config(config)
        assert all(layer.gradient_checkpointing for layer in model.get_decoder().layers)
        assert not hasattr(model.config, "gradient_checkpointing")  # taken out, as a family does
        assert not any(layer.gradient_checkpointing for layer in auto.from_config(config).get_decoder().layers)


@pytest.mark.parametrize(("case", "checkpointing"), chosen_in_turn([False, True]))
def test_two_passes_before_one_backward_add_gradients(native_family, case, checkpointing, tmp_path):
    model, batches = trained(case, native_family, tmp_path), (prompt(7), prompt(9, batch=1, seed=2))
    arguments = [CASES[case].of_training(tokens) for tokens in batches]
    apart = [loss_and_gradients(model, *both[:1], **both[1])[1] for both in zip(batches, arguments, strict=True)]
    if checkpointing:
        enable_checkpointing(model, False)
    model.zero_grad()
    both = zip(batches, arguments, strict=True)
    sum(model(tokens, use_cache=False, **of_pass).loss for tokens, of_pass in both).backward()
    expected = {name: sum(actual[name] for actual in apart if name in actual) for name in apart[0] | apart[1]}
    check_close(gradients_of(model), expected, RELATIVE[CASES[case].dtype])


# Routers with losses, statistics of batches, and what training keeps depend on the other texts of a batch.
OF_BATCHES = (*CHAPTERS, "headwise with everything", "midus-pkm", "linear")
PADDED = [name for name in CASES if name not in OF_BATCHES and "ultramem" not in name]


@pytest.mark.parametrize(("case", "attention"), chosen_in_turn(["sdpa", "eager"], PADDED))
def test_padding_changes_no_gradient(native_family, case, attention, tmp_path):
    """Also where rows that are only padding read nothing of the sequence."""
    model, sizes, given = trained(case, native_family, tmp_path, torch.float32), (11, 6), CASES[case].given()
    model.set_attn_implementation("eager" if native_family == "gemma2" else attention)  # whose scores sdpa cannot cap
    for row, size in enumerate(sizes):
        text, own = prompt(size, 1, 1), {name: of_rows[row : row + 1] for name, of_rows in given.items()}
        model(text, labels=text, num_items_in_batch=15, use_cache=False, **own).loss.backward()
    expected = gradients_of(model)
    for before in (True, False):
        pads = [(11 - size, 0) if before else (0, 11 - size) for size in sizes]
        rows = [torch.nn.functional.pad(prompt(size, 1, 1), pad) for size, pad in zip(sizes, pads, strict=True)]
        mask = (torch.cat(rows) != 0).long()
        labels = torch.cat(rows).masked_fill(mask == 0, -100)
        labels[1, pads[1][0]] = -100  # alone, the first token of a text is predicted from nothing
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        arguments = {"attention_mask": mask, "position_ids": positions, "labels": labels, **given}
        model.zero_grad()
        model(torch.cat(rows), num_items_in_batch=15, use_cache=False, **arguments).loss.backward()
        check_close(gradients_of(model), expected, 1e-4)


# Another rounding lets routers choose other chapters.
@pytest.mark.parametrize("case", chosen(name for name in CASES if name not in CHAPTERS))
def test_autocast_keeps_gradients_and_identity(native_family, case, tmp_path):
    tokens, arguments = prompt(), CASES[case].of_training(prompt())
    model = trained(case, native_family, tmp_path, torch.float32)
    _, expected = loss_and_gradients(model, tokens, **arguments)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, use_cache=False, **arguments).loss
    model.zero_grad()
    loss.backward()
    for name, gradient in gradients_of(model).items():
        assert gradient.dtype == torch.float32, name
        assert gradient.isfinite().all(), name
        if case.startswith("depth"):  # others choose slots, and may choose others
            alike = torch.cosine_similarity(gradient.flatten(), expected[name].flatten(), dim=0)
            assert alike > 0.9, name
    if CASES[case].is_base_at_first:
        still = CASES[case].model(native_family, tmp_path / "still", torch.float32, acting=False)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(logits(still, tokens, **CASES[case].given()), logits(tiny_model(native_family), tokens))


@pytest.mark.parametrize("case", INSERTED)
def test_inserted_memory_learns_first_by_its_values(native_family, case):
    base, model = tiny_model(native_family), CASES[case].model(native_family, None, acting=False)
    (entry,) = model.config.memories().entries
    learn = {name for name, gradient in loss_and_gradients(model.train(), prompt())[1].items() if gradient.any()}
    values = {f"model.layers.{layer}.memory.value_bank" for layer in entry.layers}
    assert {name for name in learn if name.startswith(tuple(f"model.layers.{at}." for at in entry.layers))} == values
    torch.optim.SGD([model.get_parameter(name) for name in values], lr=1.0).step()
    assert not torch.equal(logits(model.eval(), prompt()), logits(base, prompt()))


COEFFICIENTS = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.01}
TOKENS = 8


def labels_of(tokens: torch.Tensor, prompt_length: int = 2) -> torch.Tensor:
    labels = tokens.clone()
    labels[:, :prompt_length] = -100
    return labels


def model_with(**options) -> PreTrainedModel:
    return chapter_model(**{**COEFFICIENTS, **options})


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, **how) -> float:
    rows, targets = logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(rows, targets, **how).item()


def test_loss_adds_the_mean_of_each_memory_s_routers(native_family):
    """Each router is asked again for what it read; tests/memory has what one tells."""
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
    (True, None, None, True, False), (True, True, None, True, True), (True, False, None, False, False),
    (True, None, True, True, True), (True, None, False, False, False), (True, True, False, True, True),
    (True, False, True, False, False), (False, None, None, False, False), (False, True, None, True, True),
    (False, None, True, True, True), (False, False, True, False, False),
]  # fmt: skip


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
    assert isinstance(in_order, tuple)
    assert torch.equal(in_order[0], named.loss)
    assert any(torch.equal(value, named.logits) for value in in_order[1:] if isinstance(value, torch.Tensor))


def test_reentrant_activation_checkpointing_is_refused():
    model = model_with().train()
    enable_checkpointing(model, use_reentrant=True)
    with pytest.raises(ValueError, match=r"expected gradient_checkpointing_kwargs=\{'use_reentrant': False\}\."):
        model(prompt(TOKENS), labels=prompt(TOKENS), use_cache=False)
    model(prompt(TOKENS), labels=prompt(TOKENS), use_cache=False, output_router_logits=False).loss.backward()


def test_router_losses_are_shared_by_tokens_of_a_step():
    """Cross entropy is divided by the tokens of the step; a router's loss is its mean over tokens."""
    model, labels = model_with().train(), labels_of(prompt(TOKENS))
    labels[1, :6] = -100
    for row, tokens in enumerate((6, 2)):
        of_row = labels[row : row + 1]
        output = model(prompt(TOKENS)[row : row + 1], labels=of_row, num_items_in_batch=torch.tensor(6 + 2))
        expected = cross_entropy(output.logits, of_row, reduction="sum") / 8 + tokens / 8 * output.aux_loss.item()
        assert output.loss.item() == pytest.approx(expected, rel=1e-6), row


def test_trainer_keeps_router_columns_and_no_router_outputs():
    model = model_with()
    names = set(inspect.signature(model.forward).parameters)
    assert {"input_ids", "labels", "token_mask", "output_router_logits"} <= names
    assert {*model.config.keys_to_ignore_at_inference} == {CACHE, "router_logits", "aux_loss"}
    without = upscaled_model("llama")  # which takes no such option further
    output = without(prompt(TOKENS), labels=prompt(TOKENS), output_router_logits=True)
    assert output.loss.item() == pytest.approx(cross_entropy(output.logits, prompt(TOKENS)), rel=1e-5)
    assert "router_logits" not in output


def test_training_without_labels_warns_of_router_losses():
    model = model_with().train()
    with pytest.warns(UserWarning, match="has no labels, so the losses of its routers are not added"):
        plain = model(prompt(TOKENS))
    assert plain.loss is None
    assert "router_logits" not in plain
    for training in (True, False):
        output = model.train(training)(prompt(TOKENS), output_router_logits=True)
        assert output.loss is None, training
        assert output.aux_loss.requires_grad, training
        assert len(output.router_logits) == 2, training


KINDS = ("midus-hml", "midus-pkm", "midus-linear", "ultramem", "chapters")


def model_of(kind, family="llama", **options):
    attached = {"ultramem": ultramem_model, "chapters": chapter_model}
    if kind in attached:
        return attached[kind](family, dtype=torch.float32, addressing="random", **options)
    return upscaled_model(family, memory_type=kind, memory_options={"addressing": "random", **options})


def seeded(call, *arguments, seed=0):
    torch.manual_seed(seed)
    return call(*arguments)


# Routers with losses refuse reentrant checkpointing, random or not.
RANDOM_CHECKPOINTED = [*itertools.product(KINDS, (False, True))][:-1]


@pytest.mark.parametrize(("kind", "use_reentrant"), RANDOM_CHECKPOINTED)
def test_checkpointed_layer_reads_the_same_slots_again(kind, family, use_reentrant):
    model = model_of(kind, family).train()
    loss, gradients = seeded(loss_and_gradients, model, prompt())
    enable_checkpointing(model, use_reentrant)
    checkpointed_loss, checkpointed = seeded(loss_and_gradients, model, prompt())
    assert torch.equal(checkpointed_loss, loss)
    assert checkpointed.keys() == gradients.keys()
    assert all(torch.equal(checkpointed[name], gradient) for name, gradient in gradients.items())
    assert not torch.equal(seeded(loss_and_gradients, model, prompt(), seed=1)[0], loss)


@pytest.mark.parametrize("kind", KINDS)
def test_generation_depends_on_the_seed_alone(kind, family):
    model = model_of(kind, family)
    written = [seeded(lambda: model.generate(prompt(8), max_new_tokens=6, do_sample=False)) for _ in range(2)]
    assert written[0].shape == (2, 14)
    assert torch.equal(*written)
    plain = seeded(logits, model)
    with decode_cache(model):
        torch.testing.assert_close(seeded(logits, model), plain, rtol=1e-3, atol=1e-3)
    assert torch.equal(seeded(logits, model), plain)
    assert not torch.equal(seeded(logits, model, seed=1), plain)


def test_batch_norm_learns_statistics_of_content_queries():
    statistics = []
    for addressing in ("content", "random"):
        model = model_of("midus-pkm", addressing=addressing).train()
        model(prompt(), use_cache=False)
        statistics.append(model.model.layers[1].memory.query_mean.clone())
    assert torch.equal(*statistics)
    assert statistics[0].any()


@pytest.mark.parametrize("kind", by_default(["midus-hml", "ultramem", "chapters"], KINDS, fewest=["midus-hml"]))
def test_memory_is_one_graph(kind):
    torch._dynamo.reset()
    own_tables = {"share": "none"} if kind == "chapters" else {}
    model, results = model_of(kind, **own_tables).train(), []
    memory = next(module for module in model.modules() if isinstance(module, MemoryModule))
    states = torch.randn(2, 9, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    for forward in (memory, torch.compile(memory, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(0)
        memory.zero_grad()
        output = forward(states)
        output.square().sum().backward()
        learnt = {name: parameter for name, parameter in memory.named_parameters() if parameter.grad is not None}
        assert learnt
        results.append({"output": output, **{name: parameter.grad.clone() for name, parameter in learnt.items()}})
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
