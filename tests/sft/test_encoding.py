"""Rows are encoded in their order, by however many processes."""

import multiprocessing.context
import re
import signal
from pathlib import Path

import pytest
from sft.tiny_chats import character_tokenizer, chat
from training.tiny_run import refused

from midus_hf.sft import chat_dataset as encoding
from midus_hf.sft.chat_dataset import encode_rows
from midus_hf.topics.documents import RowPlace
from midus_hf.topics.text_files import DocumentError


def rows(count: int) -> list[tuple[str, dict]]:
    """As they come from a file."""
    places = (RowPlace(f"row {number}", Path("chats.jsonl"), number) for number in range(1, count + 1))
    return [(place, {"messages": chat(place.line)}) for place in places]


@pytest.fixture(params=[1, 3])
def processes(request, monkeypatch):
    """Blocks of 40 rows, each worth processes."""
    monkeypatch.setattr(encoding, "usable_cores", lambda: request.param)
    monkeypatch.setattr(encoding, "_ROWS_AT_A_TIME", 40)
    monkeypatch.setattr(encoding, "_ROWS_WORTH_PROCESSES", 2)
    return request.param


def test_rows_keep_their_order(processes):
    tokenizer = character_tokenizer()
    found = [tokenizer.decode(tokens.ids) for tokens in encode_rows(tokenizer, iter(rows(100)), None, "chatml")]
    assert [re.findall(r"say (\d+)", text) for text in found] == [[str(number)] for number in range(1, 101)]


def test_a_wrong_row_is_refused_by_its_place(processes):
    wrong = [*rows(50), ("row 51", {"messages": []}), *rows(3)]
    with refused(r"row 51, messages is empty; expected messages\.", DocumentError):
        list(encode_rows(character_tokenizer(), iter(wrong), None, "chatml"))


def test_no_rows_are_no_tokens(processes):
    assert list(encode_rows(character_tokenizer(), iter([]), None, "chatml")) == []


def test_workers_end_by_themselves_and_at_once_where_they_are_told_to(monkeypatch):
    """One that is killed may hold a lock, and one that waits for it hears no handler of Python, as that of the commands."""
    killed, kill = [], multiprocessing.context.ForkProcess.terminate
    monkeypatch.setattr(
        multiprocessing.context.ForkProcess, "terminate", lambda process: (killed.append(process), kill(process))
    )
    monkeypatch.setattr(encoding, "usable_cores", lambda: 2)
    monkeypatch.setattr(encoding, "_ROWS_WORTH_PROCESSES", 2)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        handlers = encoding._encode_block(lambda _: signal.getsignal(signal.SIGTERM), rows(3))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert handlers == [signal.SIG_DFL] * 3
    assert not killed
