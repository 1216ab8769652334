"""Windows over a text: which tokens each one predicts."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from midus_hf.evaluation.perplexity import _spread, _windows


@given(num_targets=st.integers(1, 400), sequence_length=st.integers(1, 50), data=st.data())
def test_every_token_is_counted_once_from_no_more_than_a_window(num_targets, sequence_length, data):
    stride = data.draw(st.integers(1, sequence_length))
    windows = _windows(num_targets, sequence_length, stride)
    counted = [target for window in windows for target in range(window.first, window.end)]
    assert counted == list(range(num_targets))
    assert all(0 <= window.start <= window.first < window.end for window in windows)
    assert all(window.end - window.start <= sequence_length for window in windows)


@given(num_targets=st.integers(10, 400), stride=st.integers(1, 10), data=st.data())
def test_max_tokens_keeps_whole_windows_from_all_over_the_text(num_targets, stride, data):
    every = _windows(num_targets, stride, stride)
    max_tokens = data.draw(st.integers(stride, num_targets))
    kept = _spread(every, stride, max_tokens)
    assert sum(window.end - window.first for window in kept) <= max_tokens
    assert len(kept) == min(len(every), max_tokens // stride)
    places = [*map(every.index, kept), len(every)]
    gaps = [after - before for before, after in itertools.pairwise(places)]
    assert places[0] == 0
    assert min(gaps) >= 1
    assert max(gaps) - min(gaps) <= 1
