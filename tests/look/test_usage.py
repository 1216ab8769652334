"""What is counted is what each memory retrieves and each text fetches, once a token, and recording it changes nothing."""

import math

import pytest
import torch
from models.memory_models import chapter_model, chapters_of, hierarchical_model
from models.upscaled import NEW_LAYERS, upscaled_model
from tiny import prompt
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from training.tiny_run import refused

from midus_hf.evaluation.text_rows import TextRows, row_losses
from midus_hf.look.usage import every_count, record_usage, summarise, usage_curve, usage_rows, usage_table

# Memories that retrieve slots.
KINDS = {
    "midus-hml": {},
    "headwise with layer norm": {"memory_options": {"n": 5, "k": 2, "query_norm": "layer"}},
    "midus-pkm": {"memory_type": "midus-pkm"},
    "linear": {"memory_type": "midus-linear"},
}


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


@pytest.mark.parametrize("kind", KINDS)
def test_slot_counts_are_those_of_a_loop(family, kind):
    model, expected = upscaled_model(family, **KINDS[kind]), {}
    for layer in NEW_LAYERS:

        def count(memory, arguments, layer=str(layer)):
            expected[layer] = expected.get(layer, 0) + counted_by_hand(memory, arguments[0])

        model.model.layers[layer].memory.register_forward_pre_hook(count)
    with record_usage(model) as usage, torch.no_grad():
        for seed in (1, 2):
            model(prompt(length=6, seed=seed), use_cache=False)
    assert usage.keys() == expected.keys()
    assert {counts.dtype for counts in usage.values()} == {torch.int64}
    assert all(torch.equal(counts, expected[position]) for position, counts in usage.items())


@torch.no_grad()
def routed_model(family):
    """A model whose residual stream has 100 or -100 in its first element, by which tokens choose chapters: nothing adds to it."""
    model = chapter_model(family, dtype=torch.float32, chapters=6, routing="token", layers=(0, 2))
    embedding = model.get_input_embeddings()
    kinds = torch.where(torch.arange(model.config.vocab_size) < 64, 100.0, -100.0)
    embedding.weight[:, 0] = kinds / getattr(embedding, "embed_scale", torch.ones(()))
    for block in model.model.layers:
        for projection in (block.self_attn.o_proj, block.mlp.down_proj):
            projection.weight[0] = 0
    for memory in chapters_of(model):
        memory.output_projection.weight[0] = 0
        memory.router_bias.zero_()
        memory.router_weight.zero_()
        memory.router_weight[:, 0] = torch.tensor([0.0, 8, 7, 0, -7, -8])
    return model


def test_tokens_count_once_per_opened_chapter(family):
    """Chapters 1 and 2 of the first kind, 4 and 5 of the other; the shared one, which all read, is not counted."""
    model = routed_model(family)
    with record_usage(model) as usage:
        for first in (3, 64):
            text = [torch.arange(first, first + length + 1) for length in (12, 12, 7)]  # padding does not count
            row_losses(model, TextRows("text", text, [0, 1, 2]), batch_size=2)
    assert {position: counts.tolist() for position, counts in usage.items()} == {
        f"{layer} chapters": [[31, 31, 0, 31, 31]] for layer in (0, 2)
    }


@torch.no_grad()
def test_compiled_and_wrapped_models_are_counted():
    model, tokens = upscaled_model("llama"), prompt(length=6)
    with record_usage(model) as plain:
        expected = model(tokens).logits
    compiled = torch.compile(model, backend="eager")
    compiled(tokens)  # so that it has been compiled before there is a hook
    with record_usage(compiled) as usage:
        logits = compiled(tokens).logits
    assert all(torch.equal(counts, plain[layer]) and counts.any() for layer, counts in usage.items())
    assert torch.equal(logits, expected)
    torch.testing.assert_close(compiled(tokens).logits, expected)
    model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
    with record_usage(model) as usage:
        model(tokens, use_cache=False)
    assert list(map(str, usage)) == ["1", "4"]
    assert all(counts.any() for counts in usage.values())


def test_usage_summary_averages_heads():
    perplexity = sum(math.prod(share**-share for share in shares) / 4 for shares in ((0.5, 0.3, 0.2), (0.5, 0.5))) / 2
    for counts, expected in (
        ([[7] * 10] * 2, (1, 1, 0.1)),
        ([[0, 9] + 8 * [0]] * 2, (0.1, 0.1, 1)),
        ([[0] * 10] * 2, (0, 0, 0)),
        ([[5, 3, 2, 0], [1, 1, 0, 0]], (5 / 8, perplexity, 0.5)),
    ):
        usage = summarise(torch.tensor(counts))
        assert (usage.used, usage.perplexity, usage.largest) == pytest.approx(expected)
    assert usage_curve(torch.tensor([[0, 8, 4, 0], [2, 2, 0, 0]])) == [(8 / 3 + 2) / 2, (4 / 3 + 2) / 2, 0, 0]


# Levels of `hierarchical_model`; the second has no blocks.
FIRST, THIRD = "hier-ffn level 1", "hier-ffn level 3"
PATHS = torch.tensor([[1, 4, 13], [1, 3, 9], [0, 0, 2]])
ROWS = [torch.arange(1, 9), torch.arange(1, 6), torch.arange(1, 4), torch.arange(1, 4)]
# 7, 4, 2 and 2 tokens of these rows are read; the first and the third of one document.
TEXT = TextRows("text", ROWS, [0, 1, 0, 2], paths=PATHS)


@pytest.fixture(scope="module")
def fetching(tmp_path_factory):
    return hierarchical_model("llama", "hier-ffn", tmp_path_factory.mktemp("bank"))


def counted(usage):
    return {at: {block: n for block, n in enumerate(counts[0].tolist()) if n} for at, counts in usage.items()}


def test_block_tokens_are_counted_without_padding(fetching):
    with record_usage(fetching) as usage, torch.no_grad():
        fetching(torch.arange(1, 4)[None], memory_ids=torch.tensor([[1, 4, 13]], dtype=torch.int16))
    assert counted(usage) == {FIRST: {1: 3}, THIRD: {13: 3}}
    for batch_size in (1, 2, 4):
        with record_usage(fetching) as usage:
            row_losses(fetching, TEXT, batch_size=batch_size)
        assert counted(usage) == {FIRST: {0: 2, 1: 13}, THIRD: {2: 2, 9: 4, 13: 9}}
    assert usage_table(usage_rows({"text": usage})).rows == [
        ["text", "hier-ffn level 1", "3", "66.7%", "49.4%", "86.67%"],
        ["text", "hier-ffn level 3", "27", "11.1%", "9.4%", "60.00%"],
    ]
    lines = list(every_count({"text": usage}))
    assert len(lines) == 3 + 27
    assert sum(line["count"] == 0 for line in lines) == 1 + 24
    assert lines[1] == {"text": "text", "memory": FIRST, "head": 0, "number": 1, "count": 13}


def test_generic_and_refused_blocks_are_not_counted(fetching, tmp_path):
    model = hierarchical_model("llama", "hier-ffn", tmp_path, without_ids="generic")
    tokens = torch.arange(1, 7)[None].expand(2, -1)
    with record_usage(model) as usage, torch.no_grad():
        model(tokens, memory_ids=torch.tensor([[1, 4, 13], [-1, -1, -1]]))
        model(input_ids=tokens)
    assert counted(usage) == {FIRST: {1: 6}, THIRD: {13: 6}}
    with record_usage(fetching) as usage, refused("memory_ids has 27 for level 3 in row 0; expected 0 to 26"):
        fetching(tokens[:1], memory_ids=torch.tensor([[1, 4, 27]]))
    assert counted(usage) == {FIRST: {}, THIRD: {}}
    blocks = fetching.fetch_memory(PATHS[:1])
    with record_usage(fetching), refused("memory_blocks is given, which does not name the blocks' nodes"):
        fetching(tokens[:1], memory_blocks=blocks)
