"""Bars of libraries are for people at a terminal, and come back where they were hidden."""

import sys

import pytest
from transformers.utils import logging

from midus_hf.library_bars import data_bars_on_terminals, library_bars_on_terminals, without_library_bars


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


@pytest.mark.parametrize("is_terminal", [True, False])
def test_bars_of_data_are_for_terminals_and_stay_hidden_where_they_were(is_terminal, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    datasets.enable_progress_bars()
    with data_bars_on_terminals():
        assert datasets.are_progress_bars_disabled() != is_terminal
    assert not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    with data_bars_on_terminals():
        pass
    assert datasets.are_progress_bars_disabled()
    datasets.enable_progress_bars()
