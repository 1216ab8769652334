"""Continuous batching of Transformers: requests in one row get the tokens that they get one by one, or are refused by name."""

from typing import Any

import pytest
import torch
import transformers
from models.cases import CASES
from models.chapter_models import chapter_model
from pairs import by_default, in_turn
from tiny import WINDOW, tiny_model
from transformers import ContinuousBatchingConfig, GenerationConfig

NEW = 8
# Requests of several lengths, some longer than a sliding window. All fit into one row.
LENGTHS = (5, 2 * WINDOW, 9, 3 * WINDOW)
# Small: by default the cache takes most of the machine's memory.
SMALL = {"num_blocks": 16, "max_batch_tokens": 64}
USUAL = ["headwise", "product-key", "linear", "token behind layers", "ultramem own", "ultramem skip", "all fetched"]
LOOK_AT_ONE_TOKEN = [
    name for name in CASES if name not in ("chunk", "ngram", "ngram behind layers") and not name.startswith("depth")
]
READ_THE_DEPTH = [name for name in CASES if name.startswith("depth")]
# From this version on, continuous batching runs attention "sdpa" as any pass does.
SDPA_IS_ITSELF = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)


def requests() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 128, (length,), generator=generator).tolist() for length in LENGTHS]


def one_by_one(model: Any) -> list[list[int]]:
    """Greedy tokens of each request."""
    tokens = (torch.tensor([request]) for request in requests())
    return [model.generate(row, max_new_tokens=NEW, do_sample=False)[0, row.shape[1] :].tolist() for row in tokens]


def in_one_row(model: Any, **arguments: Any) -> list[list[int]]:
    """Greedy tokens of each request, by continuous batching."""
    results = model.generate_batch(
        requests(),
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(**SMALL),
        **arguments,
    )
    assert [result.error for result in results.values()] == [None] * len(LENGTHS)
    return [result.generated_tokens for result in results.values()]


def with_attention(model: Any, name: str) -> Any:
    model.set_attn_implementation(name)
    return model


@pytest.mark.parametrize(("case", "attention"), in_turn(LOOK_AT_ONE_TOKEN, ["sdpa", "eager"], kept=USUAL))
def test_requests_get_the_tokens_that_they_get_one_by_one(family, case, attention, tmp_path):
    attention = "eager" if family == "gemma2" else attention  # it has no sdpa
    model = with_attention(CASES[case].model(family, tmp_path, torch.float32), attention)
    expected = one_by_one(model)
    assert in_one_row(model) == expected
    if not CASES[case].fetches:
        base = with_attention(tiny_model(family), attention)
        assert expected != one_by_one(base), "the memories change nothing"


@pytest.mark.parametrize("case", by_default(READ_THE_DEPTH[:2], READ_THE_DEPTH))
def test_heads_that_read_the_depth_need_attention_that_tells_its_sum(case, tmp_path):
    model = with_attention(CASES[case].model("qwen3", tmp_path, torch.float32), "sdpa")
    expected = one_by_one(model)
    assert expected != one_by_one(tiny_model("qwen3"))
    if SDPA_IS_ITSELF:
        assert in_one_row(model) == expected
    for attention in ("eager",) if SDPA_IS_ITSELF else ("sdpa", "eager"):
        with pytest.raises(ValueError) as raised:
            in_one_row(with_attention(model, attention))
        assert str(raised.value) == (
            f"attention 'paged|{attention}' does not tell by what its softmax divides, which a memory that attends needs; "
            "expected `generate`, or continuous batching with attn_implementation 'sdpa' and transformers 5.23."
        )


@pytest.mark.parametrize("routing", ["chunk", "sequence"])
def test_a_memory_that_keeps_a_state_of_a_sequence_is_refused(routing):
    model = chapter_model(routing=routing)
    with pytest.raises(ValueError) as raised:
        in_one_row(model)
    assert str(raised.value) == (
        "continuous batching lays the tokens of several requests in one row and keeps nothing for the memory 'chapters', which "
        "reads the tokens before; expected `generate`, or `transformers serve` without --continuous-batching, a memory that reads "
        "one token (moc with routing = 'token'), or a method without it."
    )


@pytest.mark.parametrize("name", ["memory_ids", "memory_blocks"])
def test_requests_in_one_row_cannot_fetch_blocks(name, tmp_path):
    model, ids = CASES["hier-ffn"].model("llama", tmp_path), CASES["hier-ffn"].given(len(LENGTHS))["memory_ids"]
    with pytest.raises(ValueError) as raised:
        in_one_row(model, **{name: ids})
    assert str(raised.value) == (
        f"{name} is given, and continuous batching lays the tokens of several requests in one row, where all would read the same "
        "blocks; expected `generate`, or none."
    )
