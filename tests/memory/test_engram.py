"""The n-gram memory computes what Transformers' own does, adds zero at first, and continues sequences exactly."""

import pytest
import torch

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.engram.options import TOKEN_NUMBER_LIMIT, EngramOptions
from midus_hf.memories.hosting.parts import TokenPlaces
from midus_hf.memories.hosting.state import MemoryState
from midus_hf.memories.module import build_memory
from midus_hf.ops.engram import ngram_keys, windows

SIZES = ModelSizes(hidden_size=16, num_heads=2, num_layers=2)
HASHED = {"rows": 97, "width": 8, "hash_heads": 2}
EXACT = {"table": "exact", "width": 6, "known_ngrams": 40}
VARIANTS = [HASHED, EXACT, {**HASHED, "kernel": 0}, {**HASHED, "min_order": 1, "max_order": 1}]
IDS = torch.arange(24).view(2, 12) * 7 % 10


@pytest.fixture(params=range(len(VARIANTS)))
def memory(request):
    """Return a memory of each kind in float64 with random tensors."""
    return filled(VARIANTS[request.param])


def filled(options):
    torch.manual_seed(0)
    memory = build_memory(EngramOptions(**options), SIZES).double()
    for parameter in memory.parameters():
        torch.nn.init.normal_(parameter)
    return memory


def tables_of(memory, step=2):
    """Return the tables of a memory: every second n-gram of the text is known, or another share."""
    if memory.options.table == "hashed":
        return {}
    around = windows(IDS + 1, 3)
    keys = [ngram_keys(around, order, TOKEN_NUMBER_LIMIT).flatten() for order in memory.options.orders]
    known = (keys := torch.cat(keys).unique())[keys > 0][::step]
    return {"ngrams": torch.cat([known, torch.full((40 - len(known),), TOKEN_NUMBER_LIMIT**3 - 1)])}


def rows_of(memory, ids, tables=None):
    return memory.rows_read(memory.numbers_of(ids, tables or {}, TokenPlaces()), tables or {})


def states():
    return torch.randn(2, 12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def run(memory, first=0, last=12, **context):
    return memory(states()[:, first:last], input_ids=IDS[:, first:last], tables=tables_of(memory), **context)


def assert_same(output, expected):
    """Compare up to the rounding of matrix products, which depends on the number of tokens."""
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=1e-12)


def test_gradients_are_those_of_small_differences(memory):
    names = [name for name, _ in memory.named_parameters()]
    keywords = {"input_ids": IDS[:1], "tables": tables_of(memory)}

    def output(*values):
        parameters = dict(zip(names, values, strict=True))
        return torch.func.functional_call(memory, parameters, (states()[:1],), keywords)

    assert torch.autograd.gradcheck(output, tuple(memory.parameters()), fast_mode=True)


def test_cropping_beyond_the_state_is_refused():
    memory = filled(HASHED)
    state = MemoryState("ngram", 0, True, rollback=memory.rollback)
    for _ in range(8):
        run(memory, 0, 12, state=state)
    with pytest.raises(ValueError, match="65 tokens are taken back, more than the memory 'ngram' keeps"):
        state.crop(-65)
    with pytest.raises(ValueError, match="65 tokens are taken back"):
        _ = state.kept


def test_padding_at_the_end_is_taken_back_with_its_place(memory):
    """Tokens are taken back by their places in the cache, of which some hold padding."""
    real = torch.ones(2, 12, dtype=torch.bool)
    real[0, 5:8] = False
    state, places = MemoryState("ngram", 0, True, rollback=memory.rollback), TokenPlaces(real)
    run(memory, 0, 12, tokens=places, state=state)
    state.crop(-5)  # a token and padding of the first row
    output, alone = run(memory, 8, 12, state=state), MemoryState("ngram", 0, True)
    run(memory, 0, 5, state=alone)
    assert_same(output[:1], run(memory, 8, 12, state=alone)[:1])
    whole = MemoryState("ngram", 0, True)
    run(memory, 0, 7, state=whole)
    assert_same(output[1:], run(memory, 8, 12, state=whole)[1:])


def test_documents_of_a_row_do_not_see_one_another(memory):
    starts = torch.zeros(2, 12, dtype=torch.bool)
    starts[:, 5] = True
    places = TokenPlaces(starts=starts)
    expected = torch.cat([run(memory, 0, 5), run(memory, 5, 12)], 1)
    assert_same(run(memory, tokens=places), expected)
    state = MemoryState("ngram", 0, True)
    run(memory, 0, 8, tokens=TokenPlaces(starts=starts[:, :8]), state=state)
    assert_same(run(memory, 8, 12, state=state), expected[:, 8:])


def test_unknown_ngram_reads_nothing():
    memory = filled({**EXACT, "kernel": 0})
    memory.value_table.grad = None
    tables = tables_of(memory)
    rows = rows_of(memory, IDS, tables)
    output = memory(states(), input_ids=IDS, tables=tables)
    assert torch.equal(output[(rows == 0).all(-1)], torch.zeros_like(output[(rows == 0).all(-1)]))
    output.sum().backward()
    assert not memory.value_table.grad[0].any()
    assert memory.value_table.grad[rows[rows > 0]].abs().sum(1).gt(0).all()


def test_tokens_after_the_table_are_numbered_by_ids():
    memory, like = filled({**HASHED, "known_tokens": 3}), {"token_numbers": torch.tensor([0, 1, 1])}
    rows = rows_of(memory, torch.tensor([[1, 2, 5], [2, 1, 5], [1, 2, 6]]), like)
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0, :2], rows[2, :2])
    assert not torch.equal(rows[0, 2], rows[2, 2])


def test_only_the_longest_known_ngram_may_be_read():
    memory, every = filled({**EXACT, "match": "longest"}), filled(EXACT)
    tables = tables_of(memory, step=1)
    rows, longest = rows_of(every, IDS, tables), rows_of(memory, IDS, tables)
    assert (rows[:, 2:] > 0).all()
    assert torch.equal(longest[:, 2:, 0], torch.zeros_like(longest[:, 2:, 0]))
    assert torch.equal(longest[..., 1], rows[..., 1])
    assert torch.equal(longest[:, :2], rows[:, :2])


def test_rows_are_dropped_only_in_training():
    memory = filled({**HASHED, "row_dropout": 0.5, "kernel": 0})
    assert torch.equal(run(memory.eval()), run(filled({**HASHED, "kernel": 0})))
    assert not torch.equal(run(memory.train()), run(memory))


def test_all_known_ngrams_have_one_row_in_the_control():
    memory, known = filled({**EXACT, "rows": 1}), filled(EXACT)
    tables = tables_of(known)
    assert len(memory.value_table) == 2
    assert torch.equal(rows_of(memory, IDS, tables), rows_of(known, IDS, tables).clamp(max=1))


def test_sparse_gradients_are_the_dense_ones(memory):
    run(memory).square().sum().backward()
    dense = memory.value_table.grad
    memory.value_table.grad, memory.sparse_gradient = None, True
    run(memory).square().sum().backward()
    assert torch.equal(memory.value_table.grad.to_dense(), dense)


def test_layers_hash_differently():
    options = EngramOptions(**HASHED)
    assert options.multipliers(0) != options.multipliers(1)
    memory = filled({**HASHED, "addressing": "random"})
    assert not torch.equal(run(memory), run(memory))


def test_memory_computes_what_qwen4_computes():
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

    memory = filled(HASHED)
    sizes = {"hidden_size": 16, "hc_count": 2, "ple_embed_dim": 16, "heads_per_ngram": 2, "ngram_vocab_size_base": 97}
    config = Qwen4ExpTextConfig(**sizes, rms_norm_eps=1e-6, vocab_size=10)
    other = modeling.Qwen4ExpTextPLELayer(config, 0, 0).double()
    rows = rows_of(memory, IDS)
    other.ple_embedding.forward = lambda input_ids, cache: memory.value_table[rows].flatten(-2)
    with torch.no_grad():
        other.key_proj.weight.copy_(memory.key_projection.weight.repeat(2, 1))
        other.value_proj.weight.copy_(memory.value_projection.weight)
        other.norm_key.weight.copy_(memory.key_norm_weight.repeat(2) - 1)
        other.norm_query.weight.copy_(memory.query_norm_weight.repeat(2) - 1)
        other.norm_conv.weight.copy_(memory.convolution_norm_weight.repeat(2) - 1)
        other.conv1d.weight.copy_(memory.convolution.flip(0).T.unsqueeze(1).repeat(2, 1, 1))
    expected = other(states().repeat(1, 1, 2), IDS, None)[..., :16]
    torch.testing.assert_close(run(memory), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_order": 3, "max_order": 2}, "min_order is 3 and max_order 2; expected numbers of tokens from 1 to 3"),
        ({"width": 10}, "width is 10; expected a multiple of hash_heads = 8"),
        ({"rows": 10}, "rows is 10; expected 1, or a number with 16 primes up to it"),
        ({"table": "exact", "hash_heads": 4}, "hash_heads 4 and rows 65536; expected neither, since the corpus"),
        ({"known_ngrams": 3}, "table is 'hashed' and known_ngrams 3; expected 0"),
        ({"row_dropout": 1.0}, "row_dropout is 1.0; expected a share from 0 to below 1"),
        ({"match": "longest"}, "match is 'longest' and table 'hashed', where all n-grams have rows"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        EngramOptions(**options)
