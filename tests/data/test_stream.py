"""Sequences of a stream are those of a corpus that is read whole, and a stream goes on where it was saved."""

import itertools
import json
import os
import shutil
from functools import partial

import datasets
import pyarrow.parquet
import pytest
import torch
from processes.warm import run_warm
from safetensors import safe_open
from safetensors.numpy import save_file
from training.tiny_run import document, framing_tokenizer, refused, tiny_tokenizer

from midus_hf.data import stream as stream_module
from midus_hf.data.corpus import read_corpus, read_rows
from midus_hf.data.packing import checked_paths, leaf_sequences, packed_sequences
from midus_hf.data.stream import StreamedSequences
from midus_hf.memories.hierarchical.options import BankLayout, FetchedBlocks

T, COLUMNS, KINDS = 16, ["text"], ["jsonl", "jsonl.gz", "parquet", "csv", "txt", "saved"]
# Of lengths whose sum leaves more than 1 % after the last sequence, and a blank one.
TEXTS = [document(3 + 7 * number % 40, number) if number != 4 else " \n" for number in range(23)]


@pytest.fixture(autouse=True)
def few_texts_at_once(monkeypatch):
    monkeypatch.setattr(stream_module, "_TEXTS_AT_ONCE", 3)


def write(folder, kind, texts=TEXTS):
    folder.mkdir(exist_ok=True)
    if kind == "saved":
        datasets.Dataset.from_dict({"text": texts, "title": ["w9"] * len(texts)}).save_to_disk(folder)
    elif kind == "txt":
        for number, text in enumerate(texts):
            (folder / f"{number:02}.txt").write_text(text, encoding="utf-8")
    else:
        for name, of_file in (("a", texts[:9]), ("b", texts[9:])):
            rows = datasets.Dataset.from_dict({"text": of_file, "title": ["w9"] * len(of_file)})
            {"csv": rows.to_csv, "parquet": rows.to_parquet}.get(kind, rows.to_json)(folder / f"{name}.{kind}")
    return [str(folder / f"{name}.csv") for name in "ab"] if kind == "csv" else str(folder)


def streamed(corpus, tokenizer=None, **options):
    options = {"documents_apart": False, "shuffle_buffer": 0, **options}
    return StreamedSequences(read_rows("corpus", corpus, columns=COLUMNS), tokenizer or tiny_tokenizer(), T, **options)


def taken(stream, count):
    return list(itertools.islice(stream, count))


def assert_same(some, others):
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(torch.tensor(one[name]), torch.tensor(other[name])) for name in one)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("frame", "apart"), [(None, False), ("<bos> $A", True), ("<bos> <pad> $A <eos>", False), (None, True)]
)
def test_pass_has_the_sequences_of_the_whole_corpus(tmp_path, kind, apart, frame, capsys):
    tokenizer = tiny_tokenizer() if frame is None else framing_tokenizer(frame)
    corpus = write(tmp_path / "texts", kind)
    whole = packed_sequences(read_corpus(corpus), tokenizer, T, documents_apart=apart)
    assert whole.is_short is (frame != "<bos> <pad> $A <eos>")  # whose remainder is less than 1 % of the tokens
    rows = list(whole.sequences)
    assert_same(taken(streamed(corpus, tokenizer, documents_apart=apart), 2 * len(rows) + 1), [*rows, *rows, rows[0]])
    said = capsys.readouterr().err
    assert f"all {len(TEXTS)} texts (1 of them blank, and left out)" in said
    assert "in 0 lines" not in said


def test_files_of_parquet_are_read_with_the_types_of_the_first(tmp_path):
    """A column that has a dot in its name, which Parquet also calls a part of another, is one of them."""
    for number, kind in enumerate(("string", "large_string", "string_view", None)):
        texts = TEXTS[number::4]
        named = {} if kind is None else {"a.b": pyarrow.array(texts, kind)}
        table = pyarrow.table({"a": [{"b": "w9"}] * len(texts), **named})
        pyarrow.parquet.write_table(table, tmp_path / f"{number}.parquet")
    rows, options = read_corpus(str(tmp_path), text_column="a.b"), {"documents_apart": False, "text_column": "a.b"}
    whole = packed_sequences(rows, tiny_tokenizer(), T, **options).sequences
    rows = read_rows("corpus", str(tmp_path), columns=["a.b"])
    assert_same(
        taken(StreamedSequences(rows, tiny_tokenizer(), T, shuffle_buffer=0, **options), len(whole)), list(whole)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world", "buffer"), [(1, 0), (1, 5), (2, 5), (3, 1000), (3, 0)])
def test_stream_resumes_where_it_was_saved(tmp_path, kind, buffer, world):
    corpus = write(tmp_path / "texts", kind)

    def part(rank):
        options = {"documents_apart": True, "shuffle_buffer": buffer, "seed": [0, rank]}
        return streamed(corpus, **options, rank=rank, world_size=world)

    read = []
    for rank in range(world):
        expected, made = taken(part(rank), 60), []
        read += [tuple(row["input_ids"]) for row in expected]
        for count in (0, 1, 2, 7, 20, 30):
            stream = part(rank)
            if made:
                stream.load(tmp_path / "state")
            made += taken(stream, count)
            stream.save(tmp_path / "state")
        assert_same(made, expected)
    assert {word for row in read for word in row} >= {int(w[1:]) for text in TEXTS for w in text.split()}


@pytest.mark.parametrize("kind", KINDS)
def test_load_compares_texts_of_files_that_were_written(tmp_path, kind, capsys):
    corpus = write(tmp_path / "texts", kind)
    expected = taken(streamed(corpus), 60)
    files = [path for path in (tmp_path / "texts").iterdir() if kind != "saved" or path.suffix == ".arrow"]
    for count in (20, 40):
        stream = streamed(corpus)
        taken(stream, count)
        stream.save(tmp_path / "state")
        for path in files:
            os.utime(path, ns=(1, 1))
        capsys.readouterr()
        again = streamed(corpus)
        again.load(tmp_path / "state")
        assert_same(taken(again, 60 - count), expected[count:])
        said = capsys.readouterr().err
        assert "corpus: files have been written, copied or moved since the run began; the " in said
        assert "others cannot be\n" in said
        number = int(said.partition("began; the ")[2].partition(" ")[0])
        assert number == 23 if count == 40 else 9 < number < 23
        write(tmp_path / "texts", kind, [*TEXTS[:9], *TEXTS[:8:-1]])
        changed = streamed(corpus)
        named = {"saved": "texts are", "txt": r"texts of '09\.txt', '10.txt', '11.txt', '12.txt'.* are"}
        with refused(f"corpus has changed: {named.get(kind, rf'texts of .*/b[.]{kind}. are')} not those"):
            changed.load(tmp_path / "state")
        write(tmp_path / "texts", kind)


def test_load_takes_copied_files(tmp_path, capsys):
    corpus = write(tmp_path / "texts", "jsonl")
    expected, made = taken(streamed(corpus), 60), []
    copied = shutil.copytree(corpus, tmp_path / "copied")
    # From the third on, within a file whose name has changed.
    for folder, count in ((corpus, 3), (str(copied), 20), (str(copied), 20), (corpus, 17)):
        stream = streamed(folder)
        if made:
            stream.load(tmp_path / "state")
        made += taken(stream, count)
        stream.save(tmp_path / "state")
    assert_same(made, expected)
    said = capsys.readouterr().err
    assert said.count("files have been written, copied or moved") == 2
    assert "this pass has read other texts" not in said


def test_load_of_an_earlier_version_says_what_it_compares(tmp_path, capsys):
    corpus = write(tmp_path / "texts", "jsonl")
    expected = taken(streamed(corpus), 90)
    stream = streamed(corpus)
    taken(stream, 20)
    stream.save(tmp_path / "state")
    with safe_open(tmp_path / "state", "numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys() if name != "texts_read"}
        save_file(tensors, tmp_path / "earlier", metadata=file.metadata())
    for folder, said, count in (("earlier", True, 5), ("state", True, 15), ("state", False, 5)):
        stream = streamed(corpus)
        stream.load(tmp_path / folder)
        assert ("no digests of the texts that had been read: names" in capsys.readouterr().err) is said
        assert_same(taken(stream, count), expected[20 : 20 + count])
        expected = expected[count:]
        stream.save(tmp_path / "state")  # in the next pass, it has the digests of its texts


def test_stream_says_when_files_change_between_passes(tmp_path, capsys):
    stream = streamed(write(tmp_path / "texts", "jsonl"))
    taken(stream, 20)
    write(tmp_path / "texts", "jsonl", [*TEXTS[:8], TEXTS[9], *TEXTS[9:]])
    taken(stream, 60)
    assert "corpus: this pass has read other texts than the one before; files have changed" in capsys.readouterr().err


def test_stream_says_where_blank_texts_begin(tmp_path, capsys):
    rows = [[{"text": text} for text in TEXTS[:3]], [{"text": " "}], [{"content": text} for text in TEXTS]]
    for name, of_file in zip("abc", rows, strict=True):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*of_file, *rows[0][:2]]))
    stream = streamed(str(tmp_path))
    taken(stream, 30)
    some, every, ended, *others = capsys.readouterr().err.splitlines()
    assert "/b.jsonl', after 5 others, is blank or missing under 'text'" in some
    assert "corpus: all 3 texts of '" in every
    assert "/c.jsonl' after the first 9 are blank or missing" in every
    assert "corpus: all 33 texts (24 of them blank, and left out) of '" in ended
    assert not others


def test_shuffled_pass_has_each_sequence_once(tmp_path):
    corpus = write(tmp_path / "texts", "jsonl")
    rows = list(packed_sequences(read_corpus(corpus), tiny_tokenizer(), T, documents_apart=False).sequences)
    passes = [taken(streamed(corpus, shuffle_buffer=size, seed=1), len(rows)) for size in (5, 1000)]
    orders = [[row["input_ids"] for row in read] for read in passes]
    for order in orders:
        assert sorted(order) == sorted(row["input_ids"] for row in rows) != order
    assert orders[0] != orders[1] != [row["input_ids"] for row in rows]


def test_texts_with_paths_have_the_sequences_of_their_leaves(tmp_path):
    paths = [[number % 2, number % 4 // 2 + 2 * (number % 2)] for number in range(len(TEXTS))]
    rows = [{"text": text, "path": path, "memory_tree": "f" * 64} for text, path in zip(TEXTS, paths, strict=True)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = read_corpus(str(tmp_path / "rows.jsonl"))
    banks = {"hier-ffn": BankLayout("hier-ffn", (0,), FetchedBlocks(2, ({},) * 2))}
    written = checked_paths(corpus, banks, "path")
    whole = leaf_sequences(corpus, tiny_tokenizer(), T, paths=written.paths, depth=2, documents_apart=True)
    texts = read_rows("corpus", str(tmp_path / "rows.jsonl"), columns=["text", "path", "memory_tree"])
    options = {"read_paths": partial(checked_paths, banks=banks, path_column="path"), "path_column": "path"}
    stream = StreamedSequences(texts, tiny_tokenizer(), T, documents_apart=True, depth=2, shuffle_buffer=0, **options)
    rows = taken(stream, len(whole.sequences))
    assert stream.tree == "f" * 64

    def order(rows):
        return sorted(rows, key=lambda row: (row["memory_ids"], row["input_ids"]))

    assert_same(order(rows), order(list(whole.sequences)))


def test_a_repository_and_sources_of_several_kinds_are_streamed(tmp_path, monkeypatch):
    write(tmp_path / "hub", "jsonl")
    (tmp_path / "hub" / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: '*.jsonl'\n---\n"
    )
    folder, build = str(tmp_path / "hub"), datasets.load_dataset_builder
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda source, name: build(folder, name))
    monkeypatch.setattr("midus_hf.data.corpus.check_hub_id", lambda *_: None)
    several = [folder, write(tmp_path / "texts", "parquet"), *write(tmp_path / "tables", "csv")]
    for corpus in (folder, "someone/texts", several):
        whole = packed_sequences(read_corpus(corpus), tiny_tokenizer(), T, documents_apart=False).sequences
        assert_same(taken(streamed(corpus), len(whole)), list(whole))


def test_a_process_may_end_within_a_file_of_parquet(tmp_path):
    """Threads of pyarrow's scanner would abort it."""
    datasets.Dataset.from_dict({"text": TEXTS * 200}).to_parquet(tmp_path / "x.parquet", batch_size=100)
    code = "import sys; from midus_hf.data.corpus import read_rows; rows = read_rows('corpus', sys.argv[1], columns=['text'])"
    done = run_warm(f"{code}; batches = rows.iter(9); next(batches)", tmp_path / "x.parquet")
    assert done.returncode == 0, done.stderr
