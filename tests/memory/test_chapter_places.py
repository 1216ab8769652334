"""Chapters are chosen by the tokens of a document alone: not by padding, not by neighbours in a packed row."""

import pytest
import torch
from memory.chapter_layers import assert_reads, by_loops, indices, layer, places_of, states

from midus_hf.memories.hosting.state import MemoryState
from midus_hf.memories.hosting.token_places import TokenPlaces, token_places

ROUTINGS = ("chunk", "token", "sequence")

RIGHT = [[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]]
LEFT = [[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 1]]
BOTH = [[0, 1, 1, 1, 1, 1, 1, 0], [0, 0, 0, 1, 0, 0, 0, 0]]
NOTHING = [[0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1]]
CHUNK_OF_PADDING = [[1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0]]
MASKS = {"right": RIGHT, "left": LEFT, "both": BOTH, "a row of nothing": NOTHING, "chunks": CHUNK_OF_PADDING}


def with_noise(hidden_states: torch.Tensor, mask: list[list[int]]) -> torch.Tensor:
    """The same with other padding."""
    noise = 100 * torch.randn(hidden_states.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return torch.where(torch.tensor(mask, dtype=torch.bool).unsqueeze(-1), hidden_states, noise)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("name", MASKS)
def test_padding_changes_nothing(name, routing):
    mask = MASKS[name]
    memory, hidden_states = layer(routing=routing), states(len(mask))
    places = places_of(mask)
    output = memory(hidden_states, tokens=places)
    assert_reads(output, by_loops(memory, hidden_states, indices(mask)))
    changed = memory(with_noise(hidden_states, mask), tokens=places)
    for row, is_real in enumerate(places.real):
        torch.testing.assert_close(changed[row, is_real], output[row, is_real])
    output.sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in memory.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("routing", ["chunk", "sequence"])
def test_neither_the_first_token_of_a_document_nor_the_size_of_states_decides(routing, packed):
    """In trained models the first token is an attention sink, a hundred times as large as others and alike in all texts."""
    memory, hidden_states = layer(routing=routing), states().detach()
    starts = torch.zeros(2, 8, dtype=torch.bool)
    starts[:, 4] = packed
    places = TokenPlaces(None, starts) if packed else TokenPlaces()
    logits = memory.route(hidden_states, places).logits
    others = hidden_states.clone()
    others[:, [0, 4] if packed else 0] = 100 * torch.randn(2, 2 if packed else 1, 8, dtype=torch.float64).squeeze(1)
    others *= torch.arange(1, 9, dtype=torch.float64)[:, None]
    torch.testing.assert_close(memory.route(others, places).logits, logits, rtol=1e-4, atol=1e-4)
    others[:, 1] *= -1
    assert not torch.allclose(memory.route(others, places).logits, logits, atol=1e-2)


def test_texts_of_a_few_tokens_read_by_their_own_words():
    """With chunks of 64, of which none but the first had begun before."""
    memory = layer(chunk_size=64)
    routes = memory.route(states(5, 40).detach())
    assert routes.pooled.stretches.segment_of_token.tolist() == [[0] * 8 + [row] * 32 for row in range(1, 6)]
    assert not routes.pooled.states[0].any() and routes.pooled.states[1:].any(-1).all()
    assert len(routes.logits[1:].unique(dim=0)) == 5


def test_a_right_padded_prompt_is_continued_behind_its_tokens():
    """As assistants that pad a batch on the right do: the next token of a row follows its last one."""
    memory, hidden_states = layer(chunk_size=3), states(2)
    further = states(2, 4, seed=9)
    state = MemoryState("chapters", 0, is_croppable=False)
    outputs = [memory(hidden_states, tokens=places_of(RIGHT), state=state)]
    outputs += [memory(further[:, index : index + 1], state=state) for index in range(4)]
    documents = [[[*of_row[0], 8, 9, 10, 11]] for of_row in indices(RIGHT)]
    reads = by_loops(memory, torch.cat([hidden_states, further], dim=1), documents)
    assert_reads(torch.cat(outputs, dim=1), reads)


def test_sums_of_many_half_precision_tokens_stay_exact():
    """Sums in bfloat16 would stop growing at 256 of these."""
    memory = layer(chunk_size=1024)
    hidden_states = 1 + 0.01 * states(1, 2048).detach()
    logits = memory.route(hidden_states).logits[:, -1]
    half = memory.bfloat16().route(hidden_states.bfloat16()).logits[:, -1]
    torch.testing.assert_close(half.double(), logits, rtol=3e-2, atol=3e-2)


def test_the_mask_and_positions_of_a_pass_say_where_its_tokens_stand():
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
    assert token_places(torch.ones(1, 1, 4, 4), None, 4, may_hold_documents=True) == TokenPlaces()
