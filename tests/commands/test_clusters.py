"""`midus cluster` builds, assigns and reports, and tells in one line what is wrong with a request."""

import datetime
import json
from pathlib import Path

import pytest
from sft.tiny_chats import write_rows
from tiny import json_rows
from topics.tiny_bert import WIDTH, save_tiny_bert
from topics.trees import random_tree

from midus_hf.cli.clusters import main
from midus_hf.topics.tree import TreeOrigin


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """Folder of a model, which has a tokenizer that cuts windows too."""
    return str(save_tiny_bert(tmp_path_factory.mktemp("bert") / "model"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    rows = [{"body": f"w{number % 60} w{number % 7}", "topic": "ab"[number % 2]} for number in range(60)]
    return str(write_rows(tmp_path_factory.mktemp("corpus") / "rows.jsonl", rows))


@pytest.fixture(scope="module")
def tree(bert, corpus, tmp_path_factory):
    output = tmp_path_factory.mktemp("built") / "tree"
    assert main(build_words(bert, corpus, output)) == 0
    return str(output)


SIZES = ("--branching", "3", "--levels", "2", "--samples", "40")


def build_words(bert, corpus, output, *more) -> list[str]:
    words = f"build --corpus {corpus} --embedding-model {bert} --tokenizer {bert} --output {output} --column body --device cpu"
    return [*words.split(), *(more or SIZES)]


def test_build_describes_the_tree(bert, corpus, tmp_path, capsys):
    assert main(build_words(bert, corpus, tmp_path / "tree")) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{tmp_path / 'tree'}: 60 windows in ")
    assert "of 9 leaves, 2 levels of 3, fingerprint" in out
    assert "embedding" not in err, "bars are for terminals"
    assert "cannot fill" not in err, "60 windows can fill 9 leaves"
    assert main(build_words(bert, corpus, tmp_path / "tree")) == 2
    assert "holds a tree; pass --overwrite" in capsys.readouterr().err
    assert main([*build_words(bert, corpus, tmp_path / "tree"), "--overwrite", "--seed", "3"]) == 0


def assign_words(tree, corpus, output, *more) -> list[str]:
    words = ["assign", "--tree", tree, "--corpus", corpus, "--output", output, "--column", "body", "--device", "cpu"]
    return [*map(str, words), *more]


def assigned_by(tree, corpus, output) -> list[dict]:
    assert main(assign_words(tree, corpus, output, "--overwrite")) == 0
    return json_rows(output)


def test_assign_writes_paths_and_the_tree_and_keeps_columns(tree, corpus, tmp_path, capsys):
    output, again = tmp_path / "paths.jsonl", tmp_path / "again.jsonl"
    assert main(assign_words(tree, corpus, output)) == 0
    assert capsys.readouterr().out == f"{output}: paths of 60 documents\n"
    rows = json_rows(output)
    assert [row["document"] for row in rows] == list(range(60))
    for row in rows:
        assert row["windows"] == [row["memory_ids"]]
        assert row["memory_ids"][0] == row["memory_ids"][1] // 3
    added = ("document", "memory_ids", "memory_tree", "windows")
    assert [{key: value for key, value in row.items() if key not in added} for row in rows] == json_rows(corpus)
    fingerprint = json.loads(Path(tree, "tree.json").read_text())["fingerprint"]
    assert {row["memory_tree"] for row in rows} == {fingerprint}
    assert main(assign_words(tree, corpus, output)) == 2
    assert "exists; pass --overwrite to replace it" in capsys.readouterr().err
    assert assigned_by(tree, output, again) == rows, "an assigned corpus is assigned again"


def test_assign_embeds_nothing_of_the_trees_own_corpus(tree, corpus, tmp_path, capsys, monkeypatch):
    changed = write_rows(tmp_path / "changed.jsonl", [*json_rows(corpus), {"body": "w1"}])
    embedded = assigned_by(tree, changed, tmp_path / "embedded.jsonl")
    assert "whose embeddings it has" not in capsys.readouterr().err

    def embed(*_):
        raise ValueError("a model is loaded")

    monkeypatch.setattr("midus_hf.topics.memory_retriever.TextEmbedder", embed)
    assert assigned_by(tree, corpus, tmp_path / "reused.jsonl") == embedded[:-1]
    assert "the tree was built from this corpus, whose embeddings it has" in capsys.readouterr().err
    assert main(assign_words(tree, changed, tmp_path / "no.jsonl")) == 1
    assert "a model is loaded" in capsys.readouterr().err


@pytest.fixture
def named(bert, tmp_path):
    """Return a function that builds a tree of named topics, and its corpus."""
    output, kinds = tmp_path / "named", [("plants", "trees"), ("plants", "herbs"), ("stars", "near")]
    rows = [
        {"body": f"w{number % 3 * 20 + number % 20} w{number % 3 * 20 + 7}", "topic": topic, "part": part}
        for number in range(60)
        for topic, part in [kinds[number % 3]]
    ]
    corpus = write_rows(tmp_path / "named.jsonl", rows)
    return lambda *more: main(build_words(bert, corpus, output, *more)), corpus, output


def test_topic_names_are_the_nodes_of_a_tree(named, tmp_path, capsys):
    build, corpus, tree = named
    assert build("--topic-column", "topic", "--topic-column", "part") == 0
    out = capsys.readouterr().out
    assert "60 windows in 3 of 4 leaves, 2 levels of 2" in out
    by_name = assigned_by(tree, corpus, tmp_path / "p.jsonl")
    assert "paths are those of the topics under topic, part" in capsys.readouterr().err
    path_of = {("plants", "trees"): [0, 0], ("plants", "herbs"): [0, 1], ("stars", "near"): [1, 2]}
    assert all(row["memory_ids"] == path_of[row["topic"], row["part"]] for row in by_name)
    assert all(row["windows"] == [row["memory_ids"]] for row in by_name)
    without = write_rows(tmp_path / "without.jsonl", [{"body": row["body"]} for row in by_name])
    near = assigned_by(tree, without, tmp_path / "q.jsonl")  # texts alone, as those of a question
    assert "paths are those" not in capsys.readouterr().err
    assert {tuple(row["memory_ids"]) for row in near} <= {*map(tuple, path_of.values()), (-1, -1)}
    assert {row["memory_tree"] for row in near} == {by_name[0]["memory_tree"]}
    unknown = write_rows(tmp_path / "unknown.jsonl", [{"body": "w1", "topic": "moons", "part": "near"}])
    assert main(assign_words(tree, unknown, tmp_path / "r.jsonl")) == 2
    message = "row 1 of the corpus, without blank ones, has the topic 'moons / near', which the tree does not know;"
    assert f"{message} expected" in capsys.readouterr().err
    assert build("--overwrite", "--branching", "2", "--levels", "1", "--samples", "40") == 0
    assigned_by(tree, corpus, tmp_path / "p.jsonl")
    assert "paths are those" not in capsys.readouterr().err, "a tree of clusters has no names"


@pytest.mark.parametrize(("words", "row", "message"), [
    (["--topic-column", "kind"], {}, "the corpus has no column 'kind', only body, topic, part; expected a column with the name"),
    (["--topic-column", "topic"], {"topic": " "}, "row 61 of the corpus, without blank ones, has ' ' under 'topic'; expected"),
    (["--topic-column", "topic"], {"topic": 3}, "row 61 of the corpus, without blank ones, has 3 under 'topic'; expected"),
    (["--topic-column", "topic", "--levels", "2"], {}, "--topic-column is 'topic', whose names are the nodes; --branching"),
])  # fmt: skip
def test_wrong_topic_names_are_refused(named, words, row, message, capsys):
    build, corpus, _ = named
    if row:
        corpus.write_text(corpus.read_text() + json.dumps({"body": "w1", "topic": "a", "part": "b", **row}) + "\n")
    assert build(*words) == 2
    assert message in capsys.readouterr().err


def test_assign_keeps_json_values_and_writes_others_as_text(tree, tmp_path, capsys):
    zone = "2013-05-18T05:48:54+02:00"
    values = [zone, 2**64, 3, 2.5, None, {"a": None, "b": [1, 0.1 + 0.2]}, {"b": "4"}, True]
    rows = write_rows(tmp_path / "rows.jsonl", [{"body": "w1 w2", "value": value} for value in values])
    assert repr([row["value"] for row in assigned_by(tree, rows, tmp_path / "p.jsonl")]) == repr(values)
    assert "dates" not in capsys.readouterr().err
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table, time = tmp_path / "rows.parquet", datetime.datetime
    at = pyarrow.array([time.fromisoformat(zone)], pyarrow.timestamp("s", "Europe/Paris"))
    times = {"at": at, "day": [datetime.date(2024, 5, 6)], "when": [time(2024, 5, 6, 7, 8)]}
    columns = {"body": ["w1 w2"], **times, "score": [0.5]}
    parquet.write_table(pyarrow.table(columns), table)
    (row,) = assigned_by(tree, table, tmp_path / "p.jsonl")
    line = "columns with dates are written as dates are read, in UTC if they had a zone: at, when"
    assert line in capsys.readouterr().err
    assert (row["day"], row["when"], row["score"], row["body"]) == ("2024-05-06", "2024-05-06T07:08:00", 0.5, "w1 w2")
    assert "05:48:54+02:00" in row["at"]
    parquet.write_table(pyarrow.table({**columns, "picture": [b"x"]}), table)
    assert main(assign_words(tree, table, tmp_path / "q.jsonl")) == 2
    assert "a row has the bytes b'x'; expected text" in capsys.readouterr().err
    assert not (tmp_path / "q.jsonl").exists()


def test_report_shows_nodes_with_their_words(tree, capsys):
    assert main(["report", "--tree", tree]) == 0
    out = capsys.readouterr().out
    assert "Nodes of level 1" in out
    assert "words" in out
    assert main(["report", "--tree", tree, "--level", "2", "--nodes", "2"]) == 0
    assert "Nodes of level 2" in capsys.readouterr().out


MODELS = "--embedding-model BERT --tokenizer BERT --output out"
ASSIGN = "--output p.jsonl --column body"
REFUSALS = [
    (f"build --corpus absent {MODELS}", "corpus is 'absent', which is no file or"),
    (
        "build --corpus CORPUS --column body --embedding-model no --tokenizer BERT --output out",
        "embedding model is 'no', which is no folder here, and the Hub cannot be reached"),
    ("build --corpus CORPUS --embedding-model BERT --tokenizer no --output out", "tokenizer is 'no', which is no folder here, and"),
    ("build --corpus CORPUS --column body --embedding-model BERT --tokenizer EMPTY --output out", "tokenizer is 'EMPTY', which"),
    (f"build --corpus CORPUS {MODELS}", "corpus 'CORPUS' has no column 'text', only body, topic; set text_column"),
    ("assign --tree TREE --corpus CORPUS --output no/p.jsonl", "output is 'no/p.jsonl', in a folder that does"),
    (f"assign --tree TREE --corpus BLANK.jsonl {ASSIGN}", "corpus 'BLANK.jsonl' is empty: it has"),
    (f"assign --tree TREE --corpus OWN.jsonl {ASSIGN}", "the corpus has a column 'document', which is written with the paths"),
    (f"assign --tree BARE --corpus CORPUS {ASSIGN}", "tree 'BARE' does not say how windows"),
    ("report --tree TREE --level 3", "level is 3; expected a number from 1 to 2, the levels of the tree."),
    ("report --tree TREE --nodes 0", "nodes is 0; expected at least 1."),
    ("report --tree TREE --corpus SHORT.jsonl", "SHORT.jsonl has other texts than the corpus that the tree was built from;"),
    ("report --tree TREE --corpus TURNED.jsonl", "TURNED.jsonl has other texts than the corpus"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), REFUSALS, ids=[words for words, _ in REFUSALS])
def test_wrong_request_is_refused_in_one_line(words, message, bert, corpus, tree, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    random_tree(width=WIDTH, origin=TreeOrigin(embedding_model=bert)).save(tmp_path / "BARE")
    write_rows(tmp_path / "BLANK.jsonl", [{"body": " "}, {"body": "\n"}])
    write_rows(tmp_path / "SHORT.jsonl", [{"body": "w1"}])
    (tmp_path / "TURNED.jsonl").write_text("".join(reversed(Path(corpus).read_text().splitlines(True))))
    write_rows(tmp_path / "OWN.jsonl", [{"body": "w1 w2", "document": "Letter 5"}])
    replaced = {"BERT": bert, "CORPUS": corpus, "TREE": tree}
    assert main([replaced.get(word, word) for word in words.split()]) == 2
    out, err = capsys.readouterr()
    message = message.replace("CORPUS", corpus)
    assert out == "", err
    assert err.splitlines()[-1].startswith(f"midus cluster {words.split()[0]}: {message}"), err
    assert not [*tmp_path.glob("p.jsonl*"), *tmp_path.glob("out/tree.json")]


def test_two_texts_make_one_cluster_without_empty_paths(bert, tmp_path, capsys):
    corpus = write_rows(tmp_path / "two.jsonl", [{"body": "w1 w2", "topic": "a"}, {"body": "w3", "topic": "b"}])
    assert main(build_words(bert, corpus, tmp_path / "tree")) == 0
    out, err = capsys.readouterr()
    assert "2 windows in 1 of 9 leaves" in out
    assert "2 windows cannot fill 9 leaves" in err
    assigned = assigned_by(tmp_path / "tree", corpus, tmp_path / "paths.jsonl")
    assert [row["memory_ids"] for row in assigned] == [[0, 0], [0, 0]]
    assert main(["report", "--tree", str(tmp_path / "tree"), "--level", "2"]) == 0
