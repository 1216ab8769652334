"""What is recorded of chapters is what the tokens of texts read there, and how many tokens open each."""

import math

import pytest
import torch
from analysis.chapter_models import CHAPTERS, LAYERS, LOGITS, READ, SHARED, routed_model, rows_of
from tiny import FAMILIES

from midus_hf.analysis.chapters.records import record_chapter_usage, record_chapters
from midus_hf.analysis.chapters.stats import chapter_stats
from midus_hf.analysis.text_rows import read_rows
from midus_hf.analysis.watched_models import MemoryPlace


def stats_of(model, *texts, batch_size=4):
    with record_chapters(model) as records:
        for text in texts:
            read_rows(model, text, batch_size=batch_size, records=records)
    return chapter_stats(records)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_of_texts_that_read_different_chapters_every_number_is_known(family):
    stats = stats_of(routed_model(family), rows_of("a"), rows_of("b"))
    assert [(of_layer.layer, of_layer.memory) for of_layer in stats] == [(layer, "chapters") for layer in LAYERS]
    entropy = torch.special.entr(LOGITS[SHARED:].double().softmax(0)).sum().item()
    for of_layer in stats:
        assert (of_layer.chapters, of_layer.shared_chapters, of_layer.k) == (CHAPTERS, SHARED, 2)
        assert of_layer.greatest_entropy == math.log(5)
        assert of_layer.mutual_information == pytest.approx(math.log(2)) == of_layer.greatest_information
        for kind, read in READ.items():
            text = of_layer.texts[kind]
            assert text.tokens == 31
            assert text.read_shares == [float(chapter in read) for chapter in range(CHAPTERS)]
            assert text.entropy == pytest.approx(entropy, rel=1e-5)
            assert text.effective_chapters == pytest.approx(2)
            assert text.dead_chapters == [chapter for chapter in range(CHAPTERS) if chapter not in read]
            assert (text.stability_within, text.stability_between) == (1, 1)
            assert [mass > 0 for mass in text.attention_mass] == [chapter in read for chapter in range(CHAPTERS)]
            assert text.shared_mass + text.routed_mass == pytest.approx(1)
            assert text.shared_mass == text.attention_mass[0]
            expected = [None if chapter == 3 else 2.0 * (chapter in read) for chapter in range(SHARED, CHAPTERS)]
            assert of_layer.lifts[kind] == expected
            typical = of_layer.typical[kind]
            assert sorted(row.chapter for row in typical) == read[SHARED:]
            assert [(row.read_share, row.lift) for row in typical] == [(1, 2), (1, 2)]
        assert of_layer.overall.read_shares == [1, 0.5, 0.5, 0, 0.5, 0.5]
        assert of_layer.overall.effective_chapters == pytest.approx(4)
        assert of_layer.overall.dead_chapters == [3]


def test_texts_that_read_alike_tell_nothing_of_chapters():
    (first, _) = stats_of(routed_model(), rows_of("ab", (12, 12)), rows_of("ab", (12, 12), name="other"))
    assert first.mutual_information == 0
    assert first.typical == {"ab": [], "other": []}
    (alone, _) = stats_of(routed_model(), rows_of("a"))
    assert (alone.mutual_information, alone.greatest_information, alone.typical) == (None, None, {})


def test_texts_weigh_alike_however_long_they_are():
    (first, _) = stats_of(routed_model(), rows_of("a", (12, 12, 12)), rows_of("b", (4,)))
    assert first.mutual_information == pytest.approx(math.log(2))


def test_stability_counts_common_chapters():
    (first, _) = stats_of(routed_model(), rows_of("ab", (12,)))
    assert first.overall.stability_within == 0
    assert first.overall.stability_between is None
    (first, _) = stats_of(routed_model(), rows_of("aab", (12,)))
    assert first.overall.stability_within == pytest.approx(4 / 11)  # of its pairs of neighbours
    (first, _) = stats_of(routed_model(routing="prompt"), rows_of("a"))
    assert (first.overall.stability_within, first.overall.stability_between) == (None, 1)


def test_the_first_chunk_tells_nothing_of_a_text():
    model = routed_model(routing="chunk", chunk_size=4)
    for layer in LAYERS:
        model.model.layers[layer].memories["chapters"].router_bias.data[3] = 1.0
    (first, _) = stats_of(model, rows_of("a", (12, 12)), rows_of("b", (8, 8)))
    assert [of_text.unguided_share for of_text in first.texts.values()] == [1 / 3, 1 / 2]
    assert [of_text.read_shares[3] for of_text in first.texts.values()] == [1 / 3, 1 / 2]
    assert first.mutual_information == pytest.approx(math.log(2))
    assert {row.chapter for row in first.typical["a"]} == {1, 2}
    assert (first.texts["a"].stability_within, first.texts["a"].stability_between) == (1, 1)
    assert (first.texts["b"].stability_within, first.texts["b"].stability_between) == (None, 1)
    (short, _) = stats_of(model, rows_of("a", (12,)), rows_of("b", (4, 4)))
    assert (short.mutual_information, short.lifts, short.typical) == (None, {}, {})
    assert short.texts["b"].entropy is None
    assert first.texts["a"].entropy == first.texts["b"].entropy != short.greatest_entropy
    assert short.texts["b"].stability_between is None


def test_rows_of_one_document_are_not_compared():
    text = rows_of("a")
    text.documents[:] = [0, 0, 1]
    with record_chapters(model := routed_model()) as records:
        read_rows(model, text, records=records)
    assert records.counts["a"][0, "chapters"].sums["pairs_between"] == 1


@pytest.mark.parametrize("routing", ["chunk", "prompt", "token", "sequence"])
@pytest.mark.parametrize("options", [{"weighting": "logit_bias"}, {"kv_heads": 2}, {"share": "none", "bank_rank": 3}])
def test_every_token_reads_its_chapters_and_shares_its_attention_out(routing, options):
    model = routed_model(routing=routing, chunk_size=5, **options)
    for of_layer in stats_of(model, rows_of("aab"), batch_size=3):
        text = of_layer.overall
        assert text.tokens == 31
        assert sum(text.read_shares) == pytest.approx(SHARED + 2)
        assert text.read_shares[0] == 1
        assert sum(text.attention_mass) == pytest.approx(1)


@pytest.mark.filterwarnings("error")
def test_a_row_is_a_prompt_as_a_whole():
    first, _ = stats_of(routed_model(routing="prompt"), rows_of("aaaaab", (6, 3)))
    assert first.overall.read_shares == [1, 1, 1, 0, 0, 0]


def test_batches_change_nothing():
    model, text = routed_model(routing="chunk", chunk_size=4), rows_of("aab")
    together, alone = (stats_of(model, text, batch_size=size)[1].overall for size in (3, 1))
    assert together.read_shares == alone.read_shares
    assert together.attention_mass == pytest.approx(alone.attention_mass, rel=1e-4)
    assert together.added_to_attention == pytest.approx(alone.added_to_attention, rel=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_norms_are_those_of_what_is_added(family):
    model = routed_model(family)
    text = rows_of("ab", (9,))
    before = stats_of(model, text)[0].overall
    with torch.no_grad():
        model.model.layers[0].memories["chapters"].output_projection.weight *= 2
    after = stats_of(model, text)[0].overall
    assert after.added_to_attention == pytest.approx(2 * before.added_to_attention)
    assert after.added_to_residual == pytest.approx(2 * before.added_to_residual)
    kept = {}
    layer = model.model.layers[0]
    attention = getattr(layer, layer.attention_output_norm) if layer.attention_output_norm else layer.self_attn
    handles = [
        attention.register_forward_hook(lambda module, given, output: kept.update(attention=output)),
        layer.memories["chapters"].register_forward_hook(
            lambda module, given, output: kept.update(read=given[0], added=output)
        ),
    ]
    with torch.no_grad():
        model(text.rows[0][None])
    for handle in handles:
        handle.remove()
    added = kept["attention"][0] if isinstance(kept["attention"], tuple) else kept["attention"]
    norms = [tensor.norm(dim=-1) for tensor in (kept["added"], added, kept["read"])]
    assert after.added_to_attention == pytest.approx((norms[0] / norms[1]).mean().item(), rel=1e-5)
    assert after.added_to_residual == pytest.approx((norms[0] / norms[2]).mean().item(), rel=1e-5)


def test_a_memory_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"memory is 'other'; expected one of: chapters\."):
        record_chapters(routed_model(), "other").__enter__()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_counts_once_for_each_chapter_that_it_opens(family):
    model = routed_model(family)
    with record_chapter_usage(model) as usage:
        for kinds in READ:
            read_rows(model, rows_of(kinds), batch_size=2)  # of other lengths: padding does not count
    opened = [sum(31 for read in READ.values() if chapter in read) for chapter in range(SHARED, CHAPTERS)]
    assert {spot: counts.tolist() for spot, counts in usage.counts.items()} == {
        MemoryPlace(layer, "chapters"): [opened] for layer in LAYERS
    }
