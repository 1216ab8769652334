"""What is counted is what each memory retrieves and each text fetches, once a token, and recording it changes nothing."""

import math

import pytest
import torch
from look.chapter_models import CHAPTERS, LAYERS, READ, SHARED, routed_model, rows_of
from look.memory_models import ENTRIES, has_hooks, memories, memory_model
from models.gradients import enable_checkpointing
from models.hierarchical_models import hierarchical_model
from tiny import prompt
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from training.tiny_run import refused

from midus_hf.evaluation.text_rows import TextRows, read_rows
from midus_hf.look.usage import MemoryUsage, every_count, record_usage, summarise, usage_curve, usage_rows, usage_table


def read_inputs(model, tokens) -> dict[int, torch.Tensor]:
    """What each memory reads in one forward pass, `[B, T, W]` by layer."""
    inputs, handles = {}, []
    for layer, memory in memories(model).items():
        hook = memory.register_forward_pre_hook(lambda _, arguments, layer=layer: inputs.update({layer: arguments[0]}))
        handles.append(hook)
    with torch.no_grad():
        model(tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    return inputs


def counted_by_hand(memory, attention_output) -> torch.Tensor:
    """Counts `[H, N]`: score every slot of every head for each token in float64, and take the k largest."""
    query = memory.queries(attention_output, track_statistics=False).double()
    counts = torch.zeros(memory.num_heads, memory.num_slots, dtype=torch.int64)
    for token in query.flatten(0, -3):  # [H, width]
        for head, queries in enumerate(token):
            if hasattr(memory, "slot_keys"):
                scores = memory.slot_keys[head].double() @ queries
            else:
                row, column = queries.chunk(2)
                rows = memory.row_keys[head].double() @ row
                columns = memory.column_keys[head].double() @ column
                scores = torch.stack([i + j for i in rows for j in columns])
            for slot in scores.argsort(descending=True)[: memory.k].tolist():
                counts[head, slot] += 1
    return counts


@pytest.mark.parametrize("entry", ENTRIES)
def test_counts_are_those_of_every_slot_scored_and_sorted(family, entry):
    model = memory_model(family, entry)
    batches = [prompt(length=6, seed=seed) for seed in (1, 2)]
    with record_usage(model) as usage, torch.no_grad():
        for tokens in batches:
            model(tokens, use_cache=False)
    expected = {}
    for tokens in batches:
        for layer, attention_output in read_inputs(model, tokens).items():
            counts = counted_by_hand(memories(model)[layer], attention_output)
            expected[str(layer)] = expected.get(str(layer), 0) + counts
    assert usage.keys() == expected.keys()
    for position, counts in usage.items():
        assert counts.dtype == torch.int64
        assert torch.equal(counts, expected[position])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("entry", ["headwise", "product-key"])
def test_what_checkpointing_computes_again_is_not_counted_again(family, entry, use_reentrant):
    counts = []
    for checkpointing in (False, True):
        model = memory_model(family, entry).train()
        if checkpointing:
            enable_checkpointing(model, use_reentrant)
        with record_usage(model) as usage:
            model(prompt(), labels=prompt(), use_cache=False).loss.backward()
        counts.append(usage)
    assert all(torch.equal(counts[0][layer], counts[1][layer]) for layer in counts[0])
    assert all(of_layer.sum() == prompt().numel() * 4 * 3 for of_layer in counts[0].values())


def test_every_token_counts_once_for_each_chapter_that_it_opens(family):
    model = routed_model(family)
    with record_usage(model) as usage:
        for kinds in READ:
            read_rows(model, rows_of(kinds), batch_size=2)  # of other lengths: padding does not count
    opened = [sum(28 for read in READ.values() if chapter in read) for chapter in range(SHARED, CHAPTERS)]
    assert {position: counts.tolist() for position, counts in usage.items()} == {
        f"{layer} chapters": [opened] for layer in LAYERS
    }


def test_a_compiled_model_is_counted_like_any_other():
    tokens = prompt(length=6)
    with torch.no_grad():
        model = memory_model("llama")
        with record_usage(model) as plain:
            plain_logits = model(tokens).logits
        compiled = torch.compile(model, backend="eager")
        compiled(tokens)  # so that it has been compiled before there is a hook
        with record_usage(compiled) as usage:
            logits = compiled(tokens).logits
        again = compiled(tokens).logits
    assert all(torch.equal(counts, plain[layer]) and counts.any() for layer, counts in usage.items())
    assert torch.equal(logits, plain_logits)
    torch.testing.assert_close(again, plain_logits)
    assert not has_hooks(model)


def test_two_recordings_at_a_time_do_not_disturb_each_other():
    model = memory_model("llama")
    with record_usage(model) as outer, torch.no_grad():
        with record_usage(model) as inner:
            model(prompt(length=4, batch=1))
        model(prompt(length=4, batch=1))
    for layer, counts in outer.items():
        assert torch.equal(counts, 2 * inner[layer])


def test_a_wrapped_memory_is_known_by_its_layer_and_its_name():
    model = memory_model("llama")
    model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
    with record_usage(model) as usage, torch.no_grad():
        model(prompt(), use_cache=False)
    assert list(map(str, usage)) == ["1", "3"] and all(counts.any() for counts in usage.values())


def test_even_usage_is_one_and_a_single_slot_is_one_of_all():
    even = torch.full((2, 10), 7)
    single = torch.zeros(2, 10, dtype=torch.int64)
    single[:, 3] = 9
    none = torch.zeros(2, 10, dtype=torch.int64)
    assert summarise(even) == MemoryUsage(used=1.0, perplexity=pytest.approx(1.0), largest=pytest.approx(0.1))
    assert summarise(single) == MemoryUsage(used=pytest.approx(0.1), perplexity=pytest.approx(0.1), largest=1.0)
    assert summarise(none) == MemoryUsage(0.0, 0.0, 0.0)


def test_curves_are_sorted_multiples_of_the_mean():
    counts = torch.tensor([[0, 8, 4, 0], [2, 2, 0, 0]])
    assert usage_curve(counts) == [(8 / 3 + 2) / 2, (4 / 3 + 2) / 2, 0, 0]


def test_heads_are_averaged_and_the_largest_share_is_of_any_head():
    counts = torch.tensor([[5, 3, 2, 0], [1, 1, 0, 0]])
    entropies = [-sum(p * math.log(p) for p in shares) for shares in ((0.5, 0.3, 0.2), (0.5, 0.5))]
    perplexity = sum(math.exp(entropy) / 4 for entropy in entropies) / 2
    assert summarise(counts) == MemoryUsage(used=5 / 8, perplexity=pytest.approx(perplexity), largest=0.5)


# Levels of `hierarchical_model`; the second has no blocks.
FIRST, THIRD = "hier-ffn level 1", "hier-ffn level 3"
PATHS = torch.tensor([[1, 4, 13], [1, 3, 9], [0, 0, 2]])
ROWS = [torch.arange(1, 9), torch.arange(1, 6), torch.arange(1, 4), torch.arange(1, 4)]
# Rows of which 7, 4, 2 and 2 tokens are read, the first and the third of one document.
TEXT = TextRows("text", ROWS, [0, 1, 0, 2], paths=PATHS)


@pytest.fixture(scope="module")
def fetching(tmp_path_factory):
    return hierarchical_model("llama", "hier-ffn", tmp_path_factory.mktemp("bank"))


def counted(usage):
    return {
        position: {block: tokens for block, tokens in enumerate(counts[0].tolist()) if tokens}
        for position, counts in usage.items()
    }


def test_tokens_that_are_read_with_a_block_are_counted_without_padding_however_rows_are_batched(fetching):
    with record_usage(fetching) as usage, torch.no_grad():
        fetching(torch.arange(1, 4)[None], memory_ids=torch.tensor([[1, 4, 13]], dtype=torch.int16))
    assert counted(usage) == {FIRST: {1: 3}, THIRD: {13: 3}}
    for batch_size in (1, 2, 4):
        with record_usage(fetching) as usage:
            read_rows(fetching, TEXT, batch_size=batch_size)
        assert counted(usage) == {FIRST: {0: 2, 1: 13}, THIRD: {2: 2, 9: 4, 13: 9}}
    assert usage_table(usage_rows({"text": usage})).rows == [
        ["text", "hier-ffn level 1", "3", "66.7%", "49.4%", "86.67%"],
        ["text", "hier-ffn level 3", "27", "11.1%", "9.4%", "60.00%"],
    ]
    lines = list(every_count({"text": usage}))
    assert len(lines) == 3 + 27 and sum(line["count"] == 0 for line in lines) == 1 + 24
    assert lines[1] == {"text": "text", "memory": FIRST, "head": 0, "number": 1, "count": 13}


def test_the_generic_memory_and_texts_that_fetch_nothing_are_not_counted(tmp_path):
    model = hierarchical_model("llama", "hier-ffn", tmp_path, without_ids="generic")
    tokens = torch.arange(1, 7)[None].expand(2, -1)
    with record_usage(model) as usage, torch.no_grad():
        model(tokens, memory_ids=torch.tensor([[1, 4, 13], [-1, -1, -1]]))
        model(input_ids=tokens)
    assert counted(usage) == {FIRST: {1: 6}, THIRD: {13: 6}}


def test_what_a_model_refuses_is_refused_in_its_words_and_not_counted(fetching):
    ids, message = torch.tensor([[1, 4, 27]]), "memory_ids has 27 for level 3 in row 0; expected 0 to 26"
    with record_usage(fetching) as usage, refused(message):
        fetching(torch.arange(1, 4)[None], memory_ids=ids)
    assert counted(usage) == {FIRST: {}, THIRD: {}}


def test_blocks_that_were_fetched_before_are_refused(fetching):
    blocks = fetching.fetch_memory(PATHS[:1])
    with record_usage(fetching), refused("memory_blocks is given, which does not name the blocks' nodes"):
        fetching(torch.arange(1, 4)[None], memory_blocks=blocks)
