"""Bars of libraries are for people at a terminal, and come back where they were hidden."""

import sys

import pytest
from transformers.utils import logging

from midus_hf.library_bars import library_bars_on_terminals, without_library_bars


def test_they_come_back(library_bars):
    assert logging.is_progress_bar_enabled()
    with pytest.raises(KeyError), without_library_bars():
        assert not logging.is_progress_bar_enabled()
        raise KeyError
    assert logging.is_progress_bar_enabled()


def test_they_stay_away_where_they_were_hidden_before():
    with without_library_bars():
        with without_library_bars():
            pass
        assert not logging.is_progress_bar_enabled()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_shows_them(is_terminal, library_bars, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with library_bars_on_terminals():
        assert logging.is_progress_bar_enabled() == is_terminal
