"""What cannot be read, packed or streamed is refused in one line that names the file, the row or the key, and what to do."""

import gzip
import json
from functools import partial
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from training.tiny_run import document, framing_tokenizer, refused, tiny_tokenizer

from midus_hf.data.corpus import read_corpus, read_paths, read_rows
from midus_hf.data.packing import checked_paths, packed_sequences
from midus_hf.data.stream import StreamedSequences
from midus_hf.memories.hierarchical.options import BankLayout, FetchedBlocks
from tests.data.test_corpus import lines, write

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "ab12" * 16 + "\nsize 17477929\n"
BANKS = {"hier-ffn": BankLayout("hier-ffn", (0,), FetchedBlocks(2, ({},) * 2))}
# Files, what is said of their folder, and what is read in its place, if anything.
FILES = {
    "half a pair": ({"x.jsonl": lines(["a"]) + b'{"text": "\\ud83d"}\n'}, r"cannot be read: line 2 has half a character"),
    "no JSON": ({"x.jsonl": lines(["a"]) + b"{text\n"}, "line 2 is no JSON: .* at character 2; .* Repair the file"),
    "no objects": ({"x.jsonl": b'"a"\n"b"\n'}, "line 1 is '\"a\"'; expected an object in each line"),
    "a key twice": ({"x.jsonl": b'{"text": "a", "text": "b"}\n'}, "line 1 is no JSON: it has the key 'text' 2 times"),
    "numbers in a list": ({"x.json": b'["a", 1]'}, "value 2 of its list is 1; expected an object"),
    "lines without rows": ({"x.jsonl": b" \n\n"}, "cannot be read: it has no rows"),
    "no column": ({"x.jsonl": b'{"content": "a", "id": 1}\n'}, "no column 'text', only content, id; set text_column"),
    "text and numbers": ({"x.jsonl": b'{"text": "a"}\n{"text": 3}\n'}, "has 3 in row 2, under 'text'; expected text"),
    "latin in a row": ({"x.jsonl": lines(["a"] * 2_000) + b'{"text": "\xff"}\n'}, "perhaps Windows-1252. .* iconv -f WINDOWS-1252"),
    "empty": ({"x.txt": ""}, "is empty: it has no text"),
    "blank": ({"x.jsonl": lines([" ", "\n"])}, "is empty: it has no text"),
    "no rows": ({"x.jsonl": ""}, "is empty: it has no text"),
    "an empty folder": ({"x.pdf": "a"}, r"has no text; expected files ending in \.txt"),
    "latin": ({"x.txt": "a \u00fc".encode("latin-1")}, "cannot be read: 'utf-8' codec can't decode byte 0xfc"),
    **{f"UTF-16 in {name}": ({name: text.encode("utf-16")}, "it is UTF-16. .* iconv -f UTF-16 -t UTF-8")
       for name, text in {"x.tsv": "text\tid\na\t1\n", "x.txt": "words"}.items()},
    "fields without a column": ({"x.csv": "text,id\na,1,2\nb,3,4\n"}, "its rows have more fields than its first line"),
    "a quote in a field": ({"x.csv": 'id,text\n1,a\n2,"fast, it\n3,b\n4,"low" is\n'}, "a quote in lines 3 to 5 takes more"),
    "a quote never closed": ({"x.csv": 'id,text\n1,a\n2,"fast\n3,b\n'}, "a quote in lines 3 to 4 takes more"),
    "a quote over rows": ({"x.csv": 'id,text\n1,"fast\n2,b\n3,c\n4,6"\n'}, "lines 2 to 5 takes more .*each of these lines"),
    "a quote over lines of a TSV": ({"x.tsv": 'id\ttext\n1\t"a\n\nb"\n2\tc\n'}, "lines 2 to 4 takes more .*a field of a TSV"),
    "other separators": ({"x.csv": "sep=;\nid;text\n1;a\n"}, "no column 'text', only sep=;; .* save it with commas"),
    "zero bytes": ({"a.txt": "a", "x.txt": b"a\0b"}, "x.txt', which is not text: it has zero bytes. Remove it"),
    "no Parquet": ({"a.parquet": b"PAR1"}, "a.parquet', which cannot be read"),
    "a cut archive": ({"a.jsonl": lines(), "x.jsonl.gz": gzip.compress(lines())[:-9]}, "x.jsonl.gz', .* Compressed file ended"),
    "no common columns": ({"a.csv": "text\none\n", "b.csv": "text,x\ntwo,1\n"}, "whose 2 files .* not together: .* Name one file"),
    "a broken link": ({"a.jsonl": lines(), "link.jsonl": Path("absent")}, "which cannot be read: "),
    "a pattern in a file": ({"x::y.jsonl": lines()}, "in a path as a pattern. Rename", "x::y.jsonl"),
    "a pattern in a folder": ({"shard[12]/a.jsonl": lines()}, "in a path as a pattern. Rename", "shard[12]"),
    "pointers": ({"real.txt": "a", **{f"{n}.txt": POINTER for n in range(12)}}, "0.txt', .* Git LFS pointer, .* as 11 others are"),
    **{f"a pointer, {name}": ({name: POINTER}, f"{name}', .* Git LFS pointer, not the file; run git lfs pull", name)
       for name in ("x.txt", "x.parquet")},
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_unreadable_files_are_refused_in_one_line(folder, case):
    files, message, *named = FILES[case]
    write(folder, files)
    with refused(message) as refusal:
        read_corpus(str(folder.joinpath(*named)))
    assert "\n" not in str(refusal.value)


ABSENT, EMPTY = "which does not exist; expected a file, a folder or", "is empty; expected"
ABSENCES = [("", EMPTY), ([], EMPTY), *((path, ABSENT) for path in ("absent/corpus.jsonl", "../absent", "a/b/c"))]


@pytest.mark.parametrize(
    ("corpus", "message"), [*ABSENCES, ("someone/mistyped", "no file or folder here, and the Hub cannot")]
)
def test_absent_corpus_is_refused_without_a_network(corpus, message):
    with refused(message):
        read_corpus(corpus)


def saved(folder, rows, splits=()):
    data = datasets.Dataset.from_dict(rows)
    (datasets.DatasetDict(dict.fromkeys(splits, data)) if splits else data).save_to_disk(str(folder))
    return str(folder)


def parquet_of(folder, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "x.parquet")
    return str(folder / "x.parquet")


def broken_text(folder):
    return parquet_of(
        folder, text=pyarrow.array([b"a"] * 2_000 + [b"\xff"]).view("string")
    )  # which Arrow does not check


def of_pointer(folder):
    saved(folder / "saved", {"text": ["a"]})
    next((folder / "saved").glob("*.arrow")).write_text(POINTER)
    return str(folder / "saved")


def streamed(corpus, rank=0, world_size=1, columns=("text",), **options):
    texts = read_rows("corpus", corpus, columns=columns)
    options = {"documents_apart": False, "shuffle_buffer": 0, "rank": rank, "world_size": world_size, **options}
    return StreamedSequences(texts, tiny_tokenizer(), 16, **options)


def streamed_paths(corpus):
    options = {"read_paths": partial(checked_paths, banks=BANKS, path_column="path"), "path_column": "path"}
    return list(zip(range(9), streamed(corpus, columns=("text", "path", "memory_tree"), **options), strict=False))


def with_paths(paths, **columns):
    return datasets.Dataset.from_dict({"text": ["words"] * len(paths), "path": paths, **columns})


def packed(text, length, tokenizer=None, **options):
    rows = datasets.Dataset.from_dict({"text": [text]})
    return packed_sequences(rows, tokenizer or tiny_tokenizer(), length, documents_apart=False, **options)


def without_eos():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    return tokenizer


SEVERAL, TEXT = [document(3 + 7 * number % 40, number) for number in range(23)], lines(["w3"])
ROWS = "".join(
    json.dumps({"text": document(9, 1), "path": [0, 1], "memory_tree": tree * 64}) + "\n" for tree in "aaab"
)
FRAME = framing_tokenizer("<bos> <pad> $A")


def checked(path):
    """Check six rows of one path; None for a model without a bank."""
    return checked_paths(with_paths([path or [1, 2]] * 6), BANKS if path else {}, "path")


# Files, what is done with their folder, and what is said.
REQUESTS = [
    ({}, lambda at: read_corpus(saved(at / "x", {"text": ["a"]}, ["train", "test"]), split="dev"), "train, test, and not 'dev'"),
    ({}, lambda at: read_corpus(saved(at / "x", {"text": ["a"]}), split="test"), "has no splits, but 'test' was given; leave"),
    ({}, lambda at: read_corpus(saved(at / "x", {"text": ["a"]}), name="en"), "no configurations, but 'en' was given; leave"),
    ({"a.txt": "a"}, lambda at: read_corpus(str(at), name="en"), "no configurations, but 'en' was given; leave"),
    ({"x.jsonl": TEXT}, lambda at: read_corpus(str(at / "x.jsonl"), name="en"), "no configurations, but 'en' was given; leave"),
    ({"a/train.jsonl": TEXT}, lambda at: read_corpus(str(at), split="dev"), r'Unknown split "dev"\. Should be one of'),
    ({}, lambda at: read_corpus(of_pointer(at)), "is a Git LFS pointer, not the file; run git lfs pull"),
    ({"a.jsonl": lines(["a"], id=1), "b.csv": "text,id\nb,1\n"}, lambda at: read_corpus([str(at / "a.jsonl"), str(at / "b.csv")]),
     "columns that differ in type from file to file"),
    ({}, lambda at: read_corpus(broken_text(at)), r"a row of corpus '.*x\.parquet' is not text in UTF-8: .* invalid start byte"),
    ({"README.md": "a"}, lambda at: read_rows("rows", str(at / "README.md")), r"has no rows; expected files ending in \.jsonl"),
    *(({}, lambda at, tree=tree: read_paths(with_paths([[0, 1]] * 2, memory_tree=["a" * 64, tree]), "path"), "paths of one tree")
      for tree in ("b" * 64, None)),
    ({}, lambda at: read_paths(with_paths([[0, 1]]), "leaf", "text 'a.txt'"), r"^text 'a\.txt' has no column 'leaf'"),
    *(({}, lambda at, path=path: read_paths(with_paths([[0, 1], path, [2, 7]]), "path"), "row 2 of the corpus, .* under 'path'")
      for path in (None, [], [1, -1], [1, 2, 3], [-2, 1])),
    *(({}, lambda at, path=path: checked(path), message) for path, message in (
        (None, "path_column is 'path', but the model has no memory"),
        ([0, 0, 0], r"column 'path' .* is \(6, 3\), torch.int64; expected integers"),
        ([1, 4], "has 4 for level 2 in row 0; expected 0 to 3"),
        ([2, 0], "has 2 for level 1 in row 0; expected 0 to 1"),
        ([1, 1], "no child of node 1; expected 2 to 3"),
    )),
    ({}, lambda at: packed("w5", 1000), "has 2 tokens; expected at least one sequence of 1,000"),
    ({}, lambda at: packed("w5 w6 w7", 4, vocab_size=6), "embeds"),
    ({}, lambda at: packed("w5", 4, without_eos()), "tokenizer has no EOS token"),
    ({}, lambda at: packed("w5 w6 w7", 2, FRAME), "sequence_length is 2, and the tokenizer puts 2 tokens"),
    # Streams.
    ({"x.jsonl": '{"body": "w4"}\n'}, lambda at: streamed(str(at)), "begins with 1 texts of '.*/x.jsonl' that are blank .* set"),
    ({"x.jsonl": '{"text": "w4"}\n{"text": 7}\n'}, lambda at: streamed(str(at)), "'.*/x.jsonl', .*: row 2 has 7 under 'text'"),
    ({"x.jsonl": '{"text": "w4"}\nw5\n'}, lambda at: streamed(str(at)), r"'.*/x.jsonl', .*: line 2 is no JSON.* Repair"),
    ({"x.csv": "body\nw4\n"}, lambda at: streamed(str(at)), "corpus has no column 'text', only body; set text_column"),
    ({}, lambda at: streamed(parquet_of(at, text=[7])), "after 0 texts, in '.*/x.parquet', has 7 under 'text'; expected text"),
    ({}, lambda at: streamed(parquet_of(at, text=["a"]), columns=["body"]), "corpus '.*' has no column 'body', only text; set"),
    ({"x.jsonl": ROWS}, lambda at: streamed_paths(str(at / "x.jsonl")), "after 3 texts, has paths of another tree"),
    *((files, lambda at: streamed(str(at), 1, 2), f"corpus of rank 1 .{message}") for files, message in (
        ({"a.jsonl": lines(SEVERAL), "b.jsonl": lines(SEVERAL[:1])}, r"1 of 2 files\) has 4 tokens; expected"),
        ({"a.jsonl": lines(SEVERAL[:1])}, r"1 text in 2\) has 0 tokens; expected"),
        ({"a.jsonl": lines(SEVERAL), "b.jsonl": lines([" "])}, r"1 of 2 files\) begins with 1 texts of '.*/b.jsonl' that are blank"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("files", "call", "message"), REQUESTS, ids=[row[2] for row in REQUESTS])
def test_wrong_requests_are_refused(files, call, message, folder, monkeypatch):
    monkeypatch.setattr("midus_hf.data.stream._TEXTS_AT_ONCE", 3)
    write(folder, files)
    with refused(message):
        call(folder)


@pytest.mark.parametrize("key", ["text", "corpus"])
def test_absent_package_is_named_with_what_to_run(folder, key, without):
    write(folder, {"a.txt": "a"})
    without("datasets")
    with refused(rf"^{key} .*txt' needs the package datasets, .*; run: pip install datasets$"):
        read_corpus(str(folder / "a.txt"), key=key)
