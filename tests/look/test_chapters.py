"""Chapters that tokens open are counted, which changes nothing."""

import contextlib

import pytest
import torch
from look.chapter_models import CHAPTERS, LAYERS, READ, SHARED, routed_model, rows_of
from tiny import FAMILIES, prompt

from midus_hf.evaluation.text_rows import read_rows
from midus_hf.look.usage import record_usage


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_counts_once_for_each_chapter_that_it_opens(family):
    model = routed_model(family)
    with record_usage(model) as usage:
        for kinds in READ:
            read_rows(model, rows_of(kinds), batch_size=2)  # of other lengths: padding does not count
    opened = [sum(28 for read in READ.values() if chapter in read) for chapter in range(SHARED, CHAPTERS)]
    assert {position: counts.tolist() for position, counts in usage.items()} == {
        f"{layer} chapters": [opened] for layer in LAYERS
    }


@pytest.mark.parametrize("bf16", [False, True])
def test_counting_opened_chapters_changes_no_gradient(bf16):
    gradients = []
    for context in (contextlib.nullcontext, record_usage):
        model = routed_model().train()
        with context(model), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            model(prompt(), labels=prompt(), use_cache=False).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    plain, recorded = gradients
    assert all(gradient is None or torch.equal(gradient, recorded[name]) for name, gradient in plain.items())
    assert plain.keys() == recorded.keys() and any(name.endswith("router_weight") for name in plain)
