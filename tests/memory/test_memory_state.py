"""What memories keep of sequences follows its rows through a cache, and goes where they go."""

from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from midus_hf.memories.hosting.state import MemoryState, states_in

CROPPABLE = SimpleNamespace(is_croppable=True, rollback=None)  # what a state needs to know of a memory's module


@pytest.fixture
def state() -> MemoryState:
    made = MemoryState("chapters", 2, is_croppable=False, layers=[DynamicLayer()])
    made.keep({"count": torch.tensor([1, 2, 3]), "total": torch.tensor([[1.0], [2.0], [3.0]])})
    return made


def kept(state: MemoryState) -> tuple[list, list]:
    return state.kept["count"].tolist(), state.kept["total"].flatten().tolist()


def test_cache_changes_states_as_its_layers(state):
    cache = DynamicCache()
    cache.update(torch.arange(3.0)[:, None, None, None], torch.zeros(3, 1, 1, 1), 0)
    cache.layers.append(state)
    cache.batch_repeat_interleave(2)
    assert kept(state)[0] == [1, 1, 2, 2, 3, 3]
    assert cache.layers[0].keys.flatten().tolist() == [0, 0, 1, 1, 2, 2]
    cache.reorder_cache(torch.tensor([5, 4, 3, 2, 1, 0]))
    assert kept(state) == ([3, 3, 2, 2, 1, 1], [3.0, 3.0, 2.0, 2.0, 1.0, 1.0])
    cache.batch_select_indices(torch.tensor([4, 0, 0]))
    assert kept(state) == ([1, 3, 3], [1.0, 3.0, 3.0])
    cache.reset()
    state.batch_select_indices(torch.tensor([7]))
    state.batch_repeat_interleave(2)
    assert not state.kept


def test_states_hold_no_tokens_that_a_cache_would_count(state):
    assert state.get_seq_length() == 0
    assert state.get_max_length() == -1
    assert state.get_mask_sizes(7) == (7, 0)
    state.offload()
    assert kept(state)[0] == [1, 2, 3]


def test_kept_tensors_of_equal_shape_are_overwritten(state):
    before = state.kept["count"]
    state.keep({"count": torch.tensor([4, 5, 6])})
    assert state.kept["count"] is before
    assert kept(state) == ([4, 5, 6], [1.0, 2.0, 3.0])
    state.keep({"count": torch.tensor([7])})
    assert before.tolist() == [4, 5, 6]
    assert state.kept["count"].tolist() == [7]


def test_kept_tensor_is_a_copy_without_gradient():
    state, total = MemoryState("chapters", 0, is_croppable=True), torch.ones(2, requires_grad=True)
    state.keep({})
    assert not state.kept
    state.keep({"total": total})
    with torch.no_grad():
        total.zero_()
    assert state.kept["total"].tolist() == [1, 1]
    assert not state.kept["total"].requires_grad


def test_states_follow_the_layers_of_a_cache():
    cache, wanted = DynamicCache(), {("a", 0): CROPPABLE, ("b", 1): SimpleNamespace(is_croppable=False, rollback=None)}
    states = states_in(cache, wanted, 3)
    assert len(cache.layers) == 5
    assert cache.layers[3:] == [states["a", 0], states["b", 1]]
    assert (states["a", 0].is_croppable, states["b", 1].is_croppable) == (True, False)
    assert states_in(cache, wanted, 3) == states
    assert len(cache.layers) == 5


def test_uncroppable_state_refuses_to_crop(state):
    MemoryState("chapters", 0, is_croppable=True).crop(-1)
    state.crop(0)
    assert kept(state)[0] == [1, 2, 3]
    message = "the memory 'chapters' routes by all tokens before, .*; expected decoding without an assistant"
    with pytest.raises(ValueError, match=message):
        state.crop(-1)
    with pytest.raises(ValueError, match=message):
        _ = state.kept
    state.reset()
    assert not state.kept


def test_state_is_sliding_as_its_layers():
    full, sliding = DynamicLayer(), DynamicSlidingWindowLayer(4)
    for layers, is_sliding in (([full], False), ([sliding], True), ([sliding, full], True)):
        assert MemoryState("chapters", 0, is_croppable=True, layers=layers).is_sliding is is_sliding


def test_offloading_cache_fetches_its_first_layer(monkeypatch):
    fetched = []
    cache, wanted = DynamicCache(), {("a", 0): CROPPABLE}
    state = states_in(cache, wanted, 2)["a", 0]
    monkeypatch.setattr(cache.layers[0], "prefetch", lambda: fetched.append(0))
    state.prefetch()
    assert fetched == [0]
