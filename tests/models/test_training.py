"""Laws of gradients: checkpointing, frozen bases, several passes, padding and autocast, over one table (cases.py)."""

import pytest
import torch
from models.cases import CASES, CHAPTERS, INSERTED, chosen, chosen_in_turn
from models.gradients import check_close, enable_checkpointing, gradients_of, loss_and_gradients
from models.upscaled import upscaled_model
from pairs import by_default
from tiny import logits, prompt, tiny_model
from transformers import AutoModel, AutoModelForCausalLM

from midus_hf.memories.hierarchical.training import train_blocks

# How far sums in another order may be apart, by norms.
RELATIVE = {torch.float32: 1e-4, torch.float64: 1e-9}


def trained(case, family, folder, dtype=None):
    """Return a model in training mode, whose blocks train too."""
    model = CASES[case].model(family, folder, dtype).train()
    if model.banks is not None:
        train_blocks(model.banks)
    return model


def new_parameters(model):
    """Return the names of the parameters of memories, and of layers that were inserted for one."""
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
        assert torch.equal(again, loss) and passes.count(prompt().shape) == 2
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
        arguments = {
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "labels": labels,
            **given,
        }
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
        assert gradient.dtype == torch.float32 and gradient.isfinite().all(), name
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
