"""Runs read tokens from the disk: a corpus is not held in memory, and resuming reads on where it was."""

from pathlib import Path

import numpy as np
import pytest
from training.cached_tokens import in_a_process, tokens_of
from training.tiny_run import tiny_config

from midus_hf.training.data import token_cache
from midus_hf.training.data.former_packing import PackedDataset
from midus_hf.training.run.train import prepare, train

datasets = pytest.importorskip("datasets")
pyarrow = pytest.importorskip("pyarrow")


def test_a_corpus_is_trained_on_without_being_held_in_memory(upscaled, corpus, tmp_path):
    """Thirty million tokens, 120 MB: a step may touch pages of the map, but nothing of it becomes memory of the run."""
    making, connection = in_a_process(make_a_long_corpus, tmp_path / "cache")
    assert connection.recv() > 30_000_000
    making.join()
    training, connection = in_a_process(train_on_a_long_corpus, upscaled("llama"), corpus, tmp_path)
    tokens, steps, grown = connection.recv()
    training.join()
    assert tokens > 30_000_000 and steps == 3
    assert grown < 30e6


def train_on_a_long_corpus(connection, model, corpus, folder) -> None:
    options = {"sequence_length": 128, "max_steps": 3, "corpus_options": {"cache_dir": str(folder / "cache")}}
    train(tiny_config(model, corpus, folder / "short", **options))
    before = anonymous_memory()
    datasets.load_dataset = lambda *args, **kwargs: a_row()
    run = prepare(tiny_config(model, Path("owner/name"), folder / "long", **options))
    dataset = run.trainer.train_dataset
    for index in range(0, len(dataset), 5):
        dataset[index]
    result = run.execute()
    connection.send((dataset.tokens.num_tokens, result.steps, anonymous_memory() - before))


def anonymous_memory() -> int:
    """Bytes of this process that no file backs, so that mapped pages, which the system may drop, do not count."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])


def a_row():
    return datasets.Dataset.from_dict({"text": ["w5"]})


def make_a_long_corpus(connection, cache: Path) -> None:
    """Keep thirty million tokens as those of a dataset of the Hub."""
    datasets.load_dataset = lambda *args, **kwargs: a_row()
    tile = token_cache._tokenise_batch

    def many(*arguments):
        table = tile(*arguments)
        values = np.tile(table.column("tokens").chunk(0).values.to_numpy(), 15_500_000)
        offsets = np.arange(0, len(values) + 1, 200, dtype=np.int64)
        return pyarrow.table({"tokens": pyarrow.LargeListArray.from_arrays(offsets, values[: offsets[-1]])})

    token_cache._tokenise_batch = many
    connection.send(tokens_of("owner/name", cache).num_tokens)


def test_resuming_makes_no_tokens_and_reads_no_sequence_that_was_trained_on(config_for, tmp_path, monkeypatch):
    options = {"save_steps": 8, "max_steps": 20, "corpus_options": {"cache_dir": str(tmp_path / "cache")}}
    train(config_for(**options))
    options["resume_from_checkpoint"] = str(tmp_path / "out" / "checkpoint-16")
    for name in ("_make", "tokenise"):
        monkeypatch.setattr(token_cache, name, lambda *args: pytest.fail("tokens are made again"))
    run = prepare(config_for(**options))
    read: list[int] = []
    get = PackedDataset.__getitem__
    monkeypatch.setattr(PackedDataset, "__getitem__", lambda self, index: read.append(index) or get(self, index))
    assert run.execute().steps == 20
    assert len(read) == len(set(read)) == (20 - 16 + 1) * 2, "those of four steps, and of one that is read ahead"


def test_where_datasets_is_not_installed_local_text_trains_from_memory(config_for, tmp_path, monkeypatch, capsys):
    train(config_for("mapped", max_steps=3))
    assert "is not installed" not in capsys.readouterr().out
    monkeypatch.setattr("midus_hf.training.data.training_data.importlib.util.find_spec", lambda name: None)
    train(config_for("held", max_steps=3))
    assert (
        "datasets is not installed: tokens are in memory, and made again at the next start" in capsys.readouterr().out
    )
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("mapped", "held")]
    assert weights[0] == weights[1]
