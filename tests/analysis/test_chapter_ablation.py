"""What texts lose without a chapter is measured as a person would, chapter by chapter, and leaves nothing behind."""

import pytest
import torch
from analysis.chapter_models import CHAPTERS, LAYERS, READ, SHARED, routed_model, rows_of

from midus_hf.analysis.chapters.ablation import ablate
from midus_hf.analysis.chapters.edits import zero_chapters
from midus_hf.analysis.chapters.interventions import close_chapters, swap_in_layers, zero_in_layers
from midus_hf.analysis.text_rows import read_rows

TEXTS = [rows_of("a"), rows_of("b")]


def values(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def is_unchanged(model, before):
    hooks = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return not hooks and all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("layers", [None, LAYERS])
def test_a_chapter_matters_to_the_texts_that_read_it_alone(family, layers):
    model = routed_model(family)
    before = values(model)
    result = ablate(model, TEXTS, layers=layers)
    assert (result.mode, result.memory, result.layers) == ("zero", "chapters", LAYERS)
    assert result.losses == {text.name: read_rows(model, text).mean for text in TEXTS}
    assert result.tokens == {"a": 28, "b": 28}
    assert [of_chapter.chapter for of_chapter in result.chapters] == list(range(CHAPTERS))
    for of_chapter in result.chapters:
        for kind, read in READ.items():
            assert (of_chapter.effects[kind].difference != 0) == (of_chapter.chapter in read)
    assert is_unchanged(model, before)


def test_an_effect_is_the_difference_of_losses():
    model = routed_model()
    result = ablate(model, TEXTS, chapters=[1])
    usual = read_rows(model, TEXTS[0])
    with zero_chapters(model, [1]):
        without = read_rows(model, TEXTS[0])
        assert torch.equal(read_rows(model, TEXTS[1]).sums, read_rows(routed_model(), TEXTS[1]).sums)
    effect = result.chapters[0].effects["a"]
    assert effect.difference == pytest.approx(without.mean - usual.mean)
    per_row = (without.sums - usual.sums) / usual.tokens
    assert 0 < effect.standard_error < per_row.std()
    alone = ablate(model, [rows_of("a", (9,))], chapters=[1]).chapters[0].effects["a"]
    assert alone.standard_error is None and alone.difference


def test_rows_of_one_length_have_the_error_of_a_mean():
    model, text = routed_model(), rows_of("a", (8, 8, 8, 8))
    effect = ablate(model, [text], chapters=[1]).chapters[0].effects["a"]
    usual = read_rows(model, text)
    with zero_chapters(model, [1]):
        per_row = (read_rows(model, text).sums - usual.sums) / usual.tokens
    assert effect.standard_error == pytest.approx((per_row.std() / 2).item())


def test_layers_share_a_bank_and_are_changed_one_by_one():
    model, text = routed_model(), TEXTS[0]
    before = values(model)
    with zero_chapters(model, [1]):
        both = read_rows(model, text).sums
    with zero_in_layers(model, 1, LAYERS):
        assert torch.equal(read_rows(model, text).sums, both)
    usual, sums = read_rows(model, text).sums, []
    for layer in LAYERS:
        with zero_in_layers(model, 1, [layer]):
            sums.append(read_rows(model, text).sums)
    assert not any(torch.equal(first, second) for first, second in [sums, (sums[0], both), (sums[1], usual)])
    assert is_unchanged(model, before)
    (of_layer,) = ablate(model, [text], chapters=[1], layers=[2]).chapters
    assert of_layer.effects["a"].difference == pytest.approx(((sums[1] - usual).sum() / 28).item(), abs=1e-9)


@pytest.mark.parametrize("options", [{"share": "none"}, {"bank_bits": 8}, {"bank_rank": 3}])
def test_every_kind_of_bank_is_changed_in_layers(options):
    model = routed_model(**options)
    if "bank_bits" in options:
        model.model.memory_tables["chapters"]["0"].bank_integers.random_(-100, 100)
    result = ablate(model, [TEXTS[0]], chapters=[1, 3], layers=[0])
    assert [bool(of_chapter.effects["a"].difference) for of_chapter in result.chapters] == [True, False]


def test_swapped_chapters_are_of_one_kind():
    model = routed_model()
    before = values(model)
    result = ablate(model, TEXTS, chapters=range(SHARED, CHAPTERS), mode="swap-random")
    for of_chapter in result.chapters:
        assert of_chapter.swapped_with in set(range(SHARED, CHAPTERS)) - {of_chapter.chapter}
        for kind, read in READ.items():
            assert bool(of_chapter.effects[kind].difference) == bool(
                {of_chapter.chapter, of_chapter.swapped_with} & set(read)
            )
    assert is_unchanged(model, before)
    assert result == ablate(model, TEXTS, chapters=range(SHARED, CHAPTERS), mode="swap-random", layers=LAYERS)
    with pytest.raises(ValueError, match=r"chapter 0 is the only one of its kind, shared or routed; expected another"):
        ablate(model, TEXTS, mode="swap-random")
    with swap_in_layers(model, 1, 2, LAYERS):  # both are read, in whatever order
        assert read_rows(model, TEXTS[0]).mean != pytest.approx(result.losses["a"], abs=1e-9)


def test_a_chapter_that_is_dropped_gives_way_to_the_next_best():
    model = routed_model()
    before = values(model)
    with close_chapters(model, [1]):
        logits = model.model.layers[0].memories["chapters"].router_bias.clone()
        dropped = read_rows(model, TEXTS[0]).sums
    assert logits.isinf().tolist() == [False, True, False, False, False, False]
    model.model.layers[0].memories["chapters"].router_bias.data[1] = -1e4
    model.model.layers[2].memories["chapters"].router_bias.data[1] = -1e4
    assert torch.equal(read_rows(model, TEXTS[0]).sums, dropped)
    model.load_state_dict(before)
    result = ablate(model, TEXTS, mode="drop")
    assert [of_chapter.chapter for of_chapter in result.chapters] == [1, 2, 3, 4, 5]
    assert [bool(of_chapter.effects["b"].difference) for of_chapter in result.chapters] == [False] * 3 + [True] * 2
    assert is_unchanged(model, before)


def test_the_most_read_chapters_are_tried():
    texts = [rows_of("a", (12, 12, 12)), rows_of("b", (5,))]
    result = ablate(routed_model(), texts, chapters=[0, 1, 3, 4], top=2)
    assert [(of_chapter.chapter, of_chapter.read_share) for of_chapter in result.chapters] == [(0, 1), (1, 36 / 41)]


def test_progress_ends_at_all_tokens():
    seen = []
    ablate(routed_model(), TEXTS, chapters=[1, 3], progress=lambda *given: seen.append(given))
    assert seen[-1] == (3 * 62, 3 * 62)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"mode": "burn"}, r"mode is 'burn'; expected one of: zero, swap-random, drop\."),
        ({"top": 0}, r"top is 0; expected at least 1\."),
        ({"chapters": [6]}, r"chapter is 6; expected a number from 0 to 5\."),
        ({"layers": [1]}, r"layer is 1; expected one with chapters: 0, 2\."),
        (
            {"mode": "drop", "chapters": [0]},
            r"chapter 0 is shared, which every token reads; expected routed ones, from 1 on\.",
        ),
        ({"batch_size": 0}, r"batch_size is 0; expected at least 1\."),
    ],
)
def test_what_cannot_be_done_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        ablate(routed_model(), TEXTS, **words)


def test_a_router_keeps_enough_chapters_to_choose():
    with pytest.raises(
        ValueError, match=r"1 routed chapters would be left; expected k = 2 or more\. Close fewer, or zero"
    ):
        close_chapters(routed_model(), [1, 2, 3, 4]).__enter__()


def test_a_memory_among_several_is_named():
    model = routed_model()
    model.model.layers[0].memories["other"] = model.model.layers[0].memories["chapters"]
    with pytest.raises(ValueError, match=r"the model has memories of chapters chapters, other; expected one of them"):
        ablate(model, TEXTS)
