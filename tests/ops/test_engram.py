"""Rows of n-grams are those that loops over tokens find."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from midus_hf.memories.engram.options import TOKEN_NUMBER_LIMIT, EngramOptions
from midus_hf.ops.engram import NO_TOKEN, hashed_rows, known_rows, ngram_keys, windows


def window_loop(tokens, documents, row, at, size):
    """Return the tokens before a token, itself first, as a list."""
    inside = [at - back >= 0 and documents[row][at - back] == documents[row][at] for back in range(size)]
    return [tokens[row][at - back] if inside[back] else NO_TOKEN for back in range(size)]


@given(
    st.lists(st.lists(st.integers(1, TOKEN_NUMBER_LIMIT - 1), min_size=6, max_size=6), min_size=1, max_size=3),
    st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_windows_stop_at_the_beginning_of_a_document(tokens, begins):
    document = torch.tensor(begins).long().cumsum(0).expand(len(tokens), 6)
    found = windows(torch.tensor(tokens), 3, document)
    for row in range(len(tokens)):
        for at in range(6):
            assert found[row, at].tolist() == window_loop(tokens, document.tolist(), row, at, 3)


@given(st.lists(st.integers(1, TOKEN_NUMBER_LIMIT - 1), min_size=3, max_size=3), st.integers(0, 40))
def test_hash_is_xor_of_odd_multiples_modulo_primes(tokens, index):
    options = EngramOptions(rows=1000, hash_heads=4)
    multipliers, around = options.multipliers(index), torch.tensor(tokens).view(1, 1, 3)
    for number, order in enumerate(options.orders):
        moduli = options.moduli[4 * number : 4 * number + 4]
        mixed = 0
        for token, multiplier in zip(tokens[:order], multipliers, strict=False):
            assert multiplier % 2
            assert token * multiplier < 2**63
            mixed ^= token * multiplier
        assert hashed_rows(around, order, multipliers, moduli)[0, 0].tolist() == [mixed % prime for prime in moduli]


def test_moduli_are_the_largest_distinct_primes():
    assert EngramOptions(rows=100, hash_heads=2, width=8).moduli == (97, 89, 83, 79)
    assert EngramOptions(rows=1).moduli == (1,) * 16


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), min_size=1, max_size=9, unique=True))
def test_known_ngrams_have_distinct_rows_and_others_zero(ngrams):
    def key(ngram):
        around = torch.tensor([*ngram, *(NO_TOKEN,) * (3 - len(ngram))]).view(1, 1, 3)
        return ngram_keys(around, len(ngram), TOKEN_NUMBER_LIMIT)[0, 0]

    keys = torch.stack([key(ngram) for ngram in ngrams])
    table = keys.sort().values
    assert len(set(keys.tolist())) == len(ngrams)
    assert sorted(known_rows(keys, table).tolist()) == list(range(1, len(ngrams) + 1))
    for number in range(len(ngrams)):
        without = table[table != keys[number]]
        assert known_rows(keys[number : number + 1], without).item() == 0


def test_ngram_keys_are_positive_or_zero_when_cut():
    around = torch.tensor([[[TOKEN_NUMBER_LIMIT - 1] * 3, [7, 8, NO_TOKEN]]])
    assert ngram_keys(around, 3, TOKEN_NUMBER_LIMIT).tolist() == [[TOKEN_NUMBER_LIMIT**3 - 1, 0]]
    assert ngram_keys(around, 2, TOKEN_NUMBER_LIMIT)[0, 1] == 8 * TOKEN_NUMBER_LIMIT + 7
