"""Generation with memories that act: every cache and every way through a sequence gives the same tokens."""

import warnings

import pytest
import torch
from models.cases import CASES, CLOSE, GREEDY, chosen, chosen_in_turn
from models.hosting import by_full_passes, in_steps
from models.upscaled import upscaled_model
from tiny import WINDOW, logits, prompt, tiny_model
from transformers import DynamicCache, StaticCache

from midus_hf.memories.hosting.parts import CACHE

each_case = pytest.mark.parametrize("case", chosen())
NEW = GREEDY["max_new_tokens"]
CACHES = {"dynamic": {}, "static": {"cache_implementation": "static"}, "none": {"use_cache": False}}


@each_case
def test_greedy_tokens_are_those_of_full_passes_with_any_cache(native_family, case, tmp_path):
    case, tokens = CASES[case], prompt(WINDOW + 3)
    model, base = case.model(native_family, tmp_path), tiny_model(native_family, case.dtype)
    of_base = logits(base, tokens)
    change = logits(model, tokens, **case.given()) - of_base
    assert change.abs().max() > 0.02 * of_base.abs().max(), "the memories change nothing"
    expected = by_full_passes(model, tokens, NEW, **case.given())
    for cache in CACHES.values():
        assert torch.equal(model.generate(tokens, **GREEDY, **case.given(), **cache), expected), cache


STEPS = [[10, 5, *[1] * 9], [3, 1, 12, 1, 1, 6], [1] * 24]


@pytest.mark.parametrize(("case", "steps"), chosen_in_turn(STEPS), ids=str)
def test_a_sequence_in_steps_has_the_logits_of_one_pass(native_family, case, steps, tmp_path):
    case, tokens = CASES[case], prompt(sum(steps))
    model = case.model(native_family, tmp_path)
    expected = logits(model, tokens, **case.given())
    for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=32)):
        actual = in_steps(model, tokens, steps, cache, **case.given())
        torch.testing.assert_close(actual, expected, **CLOSE[case.dtype])


def padded_on_the_left(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of one batch, and their mask."""
    longest = max(row.shape[1] for row in rows)
    padded = torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0)) for row in rows])
    return padded, (padded != 0).long()


@each_case
def test_a_left_padded_batch_gives_the_tokens_of_its_rows_alone(native_family, case, tmp_path):
    # In float64 the eager attention of Gemma-2 itself gives NaN for rows that are padding alone.
    case, dtype = CASES[case], torch.float32 if native_family == "gemma2" else None
    model = case.model(native_family, tmp_path, dtype)
    rows = [prompt(length, batch=1, seed=length) for length in (WINDOW + 4, 5)]
    padded, mask = padded_on_the_left(rows)
    alone = [
        model.generate(row, **GREEDY, **{name: of_rows[number : number + 1] for name, of_rows in case.given().items()})
        for number, row in enumerate(rows)
    ]
    for cache in (CACHES["dynamic"], CACHES["static"]):
        together = model.generate(padded, attention_mask=mask, **GREEDY, **case.given(), **cache)
        for row, tokens, expected in zip(rows, together, alone, strict=True):
            assert torch.equal(tokens[padded.shape[1] :], expected[0, row.shape[1] :])


BEAMS = {"num_beams": 3, "num_return_sequences": 2, "output_scores": True, "return_dict_in_generate": True}


@each_case
def test_beams_depend_neither_on_the_cache_nor_on_other_rows(native_family, case, tmp_path):
    case, tokens = CASES[case], prompt(6)
    model = case.model(native_family, tmp_path)
    expected = model.generate(tokens, use_cache=False, **GREEDY, **BEAMS, **case.given())
    for cache in (CACHES["dynamic"], CACHES["static"]):
        actual = model.generate(tokens, **GREEDY, **BEAMS, **case.given(), **cache)
        assert torch.equal(actual.sequences, expected.sequences)
        torch.testing.assert_close(actual.sequences_scores, expected.sequences_scores, **CLOSE[case.dtype])
    arguments = {name: of_rows[:1] for name, of_rows in case.given().items()}
    alone = model.generate(tokens[:1], **GREEDY, **BEAMS, **arguments)
    assert torch.equal(alone.sequences, expected.sequences[:2])


ASSISTED = [
    "midus-hml",
    "packs",
    "token behind layers",
    "ultramem own",
    "depth default",
    "depth projected",
    "hier-ffn",
]


@pytest.mark.parametrize("help_", ["assistant", "lookup"])
@pytest.mark.parametrize("case", [*ASSISTED, "chunk"])
def test_assisted_decoding_gives_the_same_tokens_or_is_refused(case, help_, tmp_path):
    case, row = CASES[case], prompt(4, batch=1).repeat(1, 2)
    model, arguments = case.model("llama", tmp_path), {"prompt_lookup_num_tokens": 3} if help_ == "lookup" else {}
    if help_ == "assistant":
        arguments["assistant_model"] = tiny_model("llama", case.dtype)
    if case.takes_back:
        expected = by_full_passes(model, row, NEW, **case.given(1))
        assert torch.equal(model.generate(row, **GREEDY, **case.given(1), **arguments), expected)
    else:
        with pytest.raises(ValueError, match="'chapters' routes by all tokens before, and cannot take tokens back"):
            model.generate(row, **GREEDY, **arguments)


@each_case
def test_documents_in_one_row_do_not_see_each_other(native_family, case, tmp_path):
    """Positions that begin again, without a mask, as collators for packed rows give them."""
    case, lengths = CASES[case], (WINDOW + 5, 3, 2 * WINDOW, 1)
    model, documents = case.model(native_family, tmp_path), [prompt(length, 1, length) for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = logits(model, torch.cat(documents, dim=1), position_ids=positions, **case.given(1))
    apart = torch.cat([logits(model, document, **case.given(1)) for document in documents], dim=1)
    torch.testing.assert_close(packed, apart, **CLOSE[case.dtype])


@each_case
def test_later_tokens_change_no_earlier_logits(native_family, case, tmp_path):
    case, tokens = CASES[case], prompt()
    model = case.model(native_family, tmp_path)
    changed = torch.cat([tokens[:, :WINDOW], prompt(2 * WINDOW, seed=9)], dim=1)
    before, after = (logits(model, each, **case.given()) for each in (tokens, changed))
    torch.testing.assert_close(after[:, :WINDOW], before[:, :WINDOW], **CLOSE[case.dtype])
    if case.dtype == torch.float32:  # those that are inserted, which compute each token alike whatever follows it
        assert torch.equal(after[:, :WINDOW], before[:, :WINDOW])
    assert not torch.allclose(after[:, WINDOW:], before[:, WINDOW:], atol=1e-3)


@pytest.mark.filterwarnings("always:`past_key_values` is deprecated:FutureWarning")
def test_older_cache_name_warns_as_transformers_does(family):
    model, caches = upscaled_model(family), [DynamicCache(), DynamicCache(), DynamicCache()]
    native = tiny_model(family)
    tokens = prompt()
    for module, cache in ((native, caches[0]), (model, caches[1]), (model.model, caches[2])):
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            module(tokens, past_key_values=cache)
        told = [each for each in caught if str(each.message).startswith("`past_key_values` is deprecated")]
        assert len(told) == (CACHE == "cache") and cache.get_seq_length() == tokens.shape[1]
    if CACHE == "cache":
        with pytest.warns(
            FutureWarning, match="deprecated, and ignored beside `cache`, as in Transformers. Use `cache`"
        ):
            model(tokens, cache=DynamicCache(), past_key_values=caches[1])


def test_padding_mask_of_a_step_has_one_stride():
    """Compiled decoding would be compiled again for each token, if the strides of an argument grew."""
    model = CASES["chunk"].model("llama", None)
    strides = set()
    for length in (5, 6, 7):
        mask = torch.ones(1, length, dtype=torch.long)
        prepared = model.prepare_inputs_for_generation(prompt()[:1, :1], attention_mask=mask)
        strides.add((prepared["token_mask"].shape, prepared["token_mask"].stride()))
    assert strides == {((1, 1), (1, 1))}
