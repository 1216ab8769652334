"""Segments of tokens that are routed as one: for any padding and documents of rows they read what loops read, in any steps."""

import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from memory.chapter_layers import assert_reads, by_loops, gradients_of, indices, layer, places_of, states

from midus_hf.memories.hosting.parts import TokenPlaces, token_places
from midus_hf.memories.hosting.state import MemoryState, starts_in_mask
from midus_hf.memories.moc.pooling import ChunkSizes, EqualSegments, PaddedSegments
from midus_hf.ops.moc import op as chapter_attention

TOKENS = 14


@pytest.fixture(params=[1, 1000], ids=["gathered", "sorted"])
def fewest_together(request, monkeypatch):
    """Let keys be gathered for segments of any length, or of none."""
    monkeypatch.setattr(chapter_attention, "_MIN_TOGETHER", request.param)


CHUNKS = st.builds(dict, chunk_size=st.integers(2, 12))


@st.composite
def packed_row(draw) -> tuple[int, list[int]]:
    """Padding in front of a row, and the lengths of its documents, of at most TOKENS together."""
    left = draw(st.integers(0, TOKENS))
    lengths, room = [], TOKENS - left
    while room and draw(st.booleans()):
        lengths.append(draw(st.integers(1, room)))
        room -= lengths[-1]
    return left, lengths


def packed(rows: list[tuple[int, list[int]]]) -> tuple[TokenPlaces, list[list[list[int]]]]:
    """Where the tokens of such rows stand, and the indices of each document."""
    real, starts = (torch.zeros(len(rows), TOKENS, dtype=torch.bool) for _ in range(2))
    documents = []
    for row, (left, lengths) in enumerate(rows):
        documents.append([])
        first = left
        for length in lengths:
            real[row, first : first + length] = True
            starts[row, first] = first > left
            documents[-1].append(list(range(first, first + length)))
            first += length
    return TokenPlaces(real, starts if starts.any() else None), documents


PADDED = [(3, [5]), (0, [TOKENS]), (TOKENS, []), (TOKENS - 1, [1]), (0, [2])]


@pytest.mark.usefixtures("fewest_together")
@settings(max_examples=25)
@given(
    options=CHUNKS | st.sampled_from([{"routing": "sequence"}, {"routing": "token"}]),
    rows=st.lists(packed_row(), min_size=1, max_size=3),
)
@example(options={"chunk_size": 3}, rows=PADDED)
@example(options={"routing": "sequence"}, rows=PADDED)
@example(options={"routing": "token"}, rows=PADDED)
def test_segments_of_any_rows_equal_loops(options, rows):
    places, documents = packed(rows)
    memory, hidden_states = layer(**options), states(len(rows), TOKENS)
    output = memory(hidden_states, tokens=places)
    reads = by_loops(memory, hidden_states, documents)
    if not reads:
        return
    assert_reads(output, reads)
    actual = torch.stack([output[position] for position in reads])
    expected = torch.stack([read.added for read in reads.values()])
    wanted = [hidden_states, *memory.parameters()]
    torch.testing.assert_close(gradients_of(actual, wanted), gradients_of(expected, wanted))


@pytest.mark.usefixtures("fewest_together")
@settings(max_examples=25)
@given(
    options=CHUNKS, left=st.integers(0, 6), right=st.integers(0, 6), cuts=st.lists(st.integers(0, TOKENS), max_size=6)
)
@example(options={"chunk_size": 3}, left=0, right=3, cuts=[8, 9, 10, 11, 12])
def test_steps_equal_one_pass(options, left, right, cuts):
    """Of a prompt that is padded on the left or on the right, behind whose tokens the next one follows."""
    edges = [0, *sorted(cuts), TOKENS]
    memory, hidden_states = layer(**options), states(2, TOKENS)
    mask = [[0] * left + [1] * (TOKENS - left), [1] * TOKENS]
    for index in range(max(0, edges[1] - right), edges[1]):
        mask[1][index] = 0
    state, outputs = MemoryState("chapters", 0, is_croppable=False), []
    for first, last in itertools.pairwise(edges):
        part = places_of([row[first:last] for row in mask]) if first < last else TokenPlaces()
        outputs.append(memory(hidden_states[:, first:last], tokens=part, state=state))
    assert_reads(torch.cat(outputs, dim=1), by_loops(memory, hidden_states, indices(mask)))


@given(
    sizes=st.integers(2, 9).flatmap(lambda size: st.tuples(st.integers(2, size), st.just(size))),
    documents=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    before=st.integers(0, 30),
)
def test_rows_have_at_most_the_expected_chunks(sizes, documents, before):
    """`most` is what a compiled graph makes room for; a row may go on with a document that has `before` tokens."""
    chunk_sizes, tokens = ChunkSizes(*sizes), sum(documents)
    places = [*range(before, before + documents[0])]
    for length in documents[1:]:
        places += range(length)
    position = torch.tensor(places)
    begins = chunk_sizes.begins(position)
    begins[0] |= before >= chunk_sizes.first
    most = chunk_sizes.most(tokens, 3, continues=before > 0, holds_documents=len(documents) > 1)
    assert 3 * begins.sum() <= most <= 3 * tokens
    expected = {(False, False): 8, (True, False): 9, (False, True): 56}
    for (continues, holds), chunks in expected.items():
        assert ChunkSizes(8, 64).most(512, 4, continues=continues, holds_documents=holds) == 4 * chunks


def test_pass_routes_segments_not_tokens(monkeypatch):
    """512 tokens of chunks of 64: eight that are guided, and one for all beginnings, however rows are laid out."""
    memory = layer(chunk_size=64)
    hidden_states = states(2, 512).detach()
    documents = torch.zeros(2, 512, dtype=torch.bool)
    documents[:, 100] = documents[:, 300] = True
    mask = torch.ones(2, 512, dtype=torch.bool)
    mask[0, :200] = False
    cases = {
        "plain": (TokenPlaces(), PaddedSegments, 1 + 2 * 8),
        "packed": (TokenPlaces(None, documents), PaddedSegments, 1 + 2 * (2 + 4 + 4)),
        "left": (TokenPlaces(mask, None), PaddedSegments, 1 + 2 * 8),
    }
    for name, (places, kind, number) in cases.items():
        routing = memory.route(hidden_states, places)
        assert len(routing.logits) == len(routing.pooled.counts) == number, name
        assert type(routing.pooled.segments) is kind
        assert routing.pooled.counts.sum() == (824 if name == "left" else 1024)
    for routing, kind, number in (("sequence", EqualSegments, 2), ("token", EqualSegments, 1024)):
        result = layer(routing=routing).route(hidden_states)
        assert (type(result.pooled.segments), len(result.logits)) == (kind, number)
    packed_documents = layer(routing="sequence").route(hidden_states, cases["packed"][0])
    assert len(packed_documents.logits) == 6


@pytest.mark.parametrize("routing", ["chunk", "sequence"])
def test_compiled_documents_equal_eager_ones(routing):
    """Whose number a graph cannot know: it has room for the most that there could be, and its tokens attend one by one."""
    memory, hidden_states = layer(routing=routing, chunk_size=16), states(2, 40)
    starts = torch.zeros(2, 40, dtype=torch.bool)
    starts[0, 5] = starts[0, 30] = starts[1, 39] = True
    places = TokenPlaces(None, starts)
    torch._dynamo.reset()
    compiled = torch.compile(memory, fullgraph=True, backend="eager")
    gradients = []
    for forward in (memory, compiled):
        output = forward(hidden_states, tokens=places)
        gradients.append((output, *torch.autograd.grad(output.square().sum(), [hidden_states, memory.bank])))
    torch.testing.assert_close(gradients[1], gradients[0])
    torch._dynamo.reset()


@pytest.mark.parametrize("fewest_together", [1], indirect=True)
@pytest.mark.usefixtures("fewest_together")
def test_padding_reads_nothing():
    mask = [[0, 0, 0, 1, 1, 1, 1, 1], [0] * 8]
    output = layer()(states(2), tokens=places_of(mask))
    assert not output[0, :3].any()
    assert not output[1].any()
    assert output[0, 3:].any(-1).all()


def test_sums_of_half_precision_tokens_stay_exact():
    """Sums in bfloat16 would stop growing at 256 of these."""
    memory = layer(chunk_size=1024)
    hidden_states = 1 + 0.01 * states(1, 2048).detach()
    logits = memory.route(hidden_states).logits[:, -1]
    half = memory.bfloat16().route(hidden_states.bfloat16()).logits[:, -1]
    torch.testing.assert_close(half.double(), logits, rtol=3e-2, atol=3e-2)


def test_token_places_follow_mask_and_positions():
    def found(mask, positions, tokens=4, may_hold_documents=True):
        arguments = [None if rows is None else torch.tensor(rows) for rows in (mask, positions)]
        return token_places(*arguments, tokens, may_hold_documents=may_hold_documents)

    assert found(None, None) == found([[1] * 4], None) == TokenPlaces()
    assert found(None, [[0, 1, 2, 3]]) == TokenPlaces()
    assert found(None, [[7, 8, 9, 10]]) == TokenPlaces()
    packed = found(None, [[0, 1, 0, 1], [0, 1, 2, 3]])
    assert packed.starts.tolist() == [[False, False, True, False], [False] * 4]
    assert found(None, [[0, 1, 0, 1]], may_hold_documents=False) == TokenPlaces()
    assert found([[1] * 4], [[0, 1, 0, 1]]).starts is None, "with a mask, rows are one document"
    for mask in ([[1, 1, 0, 0]], [[0, 1, 1, 1]], [[1, 0, 1, 1]], [[0] * 4]):
        assert found(mask, None).real.tolist() == [[bool(value) for value in mask[0]]]
    assert found([[0, 0, 1, 1, 0, 1]], None, tokens=2).real.tolist() == [[False, True]], "the last of a longer mask"
    assert found([[0, 0, 1, 1]], None, tokens=1).real.tolist() == [[True]]
    assert found(None, [[3, 4, 1, 2]]).starts.tolist() == [[False, False, True, False]], (
        "as Transformers hides documents"
    )
    assert token_places(torch.ones(1, 1, 4, 4), None, 4, may_hold_documents=True) == TokenPlaces()


def test_documents_are_those_of_a_mask_between_tokens():
    def starts(shown, first=0, reaches_back=False, real=None):
        shown = torch.tensor(shown, dtype=torch.bool)[None]
        return starts_in_mask(shown, None if real is None else torch.tensor([real]), first, reaches_back, "ngram")

    assert starts([[1, 0, 0], [1, 1, 0], [0, 1, 1]]) is None, "a window"
    assert starts([[1, 0, 0], [0, 1, 0], [0, 1, 1]]).tolist() == [[False, True, False]]
    assert starts([[1, 0, 0], [1, 0, 0], [1, 0, 1]], real=[True, False, True]) is None
    assert starts([[1, 1, 1, 0], [1, 1, 1, 1]], first=2, reaches_back=True) is None
    assert starts([[1, 0, 1, 0], [1, 0, 1, 1]], first=2) is None, "padding of the cache, which a token mask tells"
    refused = [[[1, 0, 0], [1, 1, 0], [1, 0, 1]], 0, False], [[[1, 0, 1, 0], [1, 0, 1, 1]], 2, True]
    for arguments in refused:
        with pytest.raises(
            ValueError, match=r"^attention_mask hides .* 'ngram' reads .*; expected one text per row\. Give"
        ):
            starts(*arguments)
