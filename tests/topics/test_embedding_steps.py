"""What tasks of a pipeline embed is joined to the tree that one run builds of the same corpus, to the last bit."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from midus_hf.topics import window_writer
from midus_hf.topics.building import TreeOptions
from midus_hf.topics.corpus import Corpus
from midus_hf.topics.run import BuildRequest, build, build_from_embeddings, open_build
from midus_hf.topics.window_store import JoinedRows, open_windows

pytest.importorskip("datatrove")
pytest.importorskip("pyarrow")

import pyarrow
from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import ParquetReader
from pyarrow import parquet

from midus_hf.topics.datatrove_steps import AssignWindows, BuildTree, ClusterLevel, EmbedWindows

OPTIONS = TreeOptions(branching=3, levels=2, steps=4, samples=50)
# Strings are sorted `b.parquet`, `b/c.parquet`; paths the other way.
FILES = {"a.parquet": 7, "b.parquet": 30, "b/c.parquet": 20, "b/d.parquet": 1, "e.parquet": 15}

# Of documents in turn; those of other files have `p`.
LABELS = {"b.parquet": "xyz", "b/c.parquet": "zyx"}

TREE_FILES = ("tree.json", "tree.safetensors", "windows/leaves.npy", "windows/documents.npy", "windows/labels.npy")


@pytest.fixture
def texts(tmp_path):
    """A folder of five files; each fifth document is blank, and two of them have the same labels in another order."""
    number = 0
    for name, documents in FILES.items():
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rows: dict[str, list[str]] = {"text": [], "label": []}
        for _ in range(documents):
            words = [f"w{(7 * number + place) % 60}" for place in range(1 + 5 * number % 12)]
            rows["text"].append(" ".join(words) if number % 5 else "  ")
            rows["label"].append(LABELS.get(name, "p")[number % len(LABELS.get(name, "p"))])
            number += 1
        parquet.write_table(pyarrow.table(rows), path)
    return str(tmp_path / "texts")


@pytest.fixture
def embed(bert, tmp_path):
    def make(output="embeddings", **given):
        return EmbedWindows(
            str(tmp_path / output),
            bert,
            bert,
            **{"window_tokens": 5, "label_key": "label", "source_key": "file_path", **given},
        )

    return make


@pytest.fixture
def run_tasks(texts, tmp_path):
    def run(step, tasks, workers=1):
        logs = str(
            tmp_path / f"logs-{len(list(tmp_path.glob('logs-*')))}"
        )  # of this run alone: no task counts as done
        pipeline = [ParquetReader(texts), step]
        LocalPipelineExecutor(pipeline, tasks, workers, logging_dir=logs, start_method="fork").run()

    return run


@pytest.fixture
def built_alone(bert, texts, tmp_path):
    """The tree that `midus cluster build` makes."""
    corpus = Corpus(texts, label_column="label")
    build(BuildRequest(corpus, bert, bert, tmp_path / "alone", OPTIONS, window_tokens=5))
    return tmp_path / "alone"


def assert_same_tree(output, expected, names=TREE_FILES) -> None:
    for name in names:
        assert (output / name).read_bytes() == (expected / name).read_bytes(), name


def digests(folder):
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*/[!.]*"))}


@pytest.mark.parametrize(("tasks", "workers"), [(3, 2), (8, 1)])
def test_the_tree_does_not_depend_on_how_many_tasks_embed(embed, run_tasks, built_alone, tmp_path, tasks, workers):
    run_tasks(embed(), tasks, workers)
    tree = build_from_embeddings(tmp_path / "embeddings", tmp_path / "tree", OPTIONS)
    assert_same_tree(tmp_path / "tree", built_alone)
    assert not (tmp_path / "tree" / "windows" / "embeddings.npy").exists(), "they are read where they are"
    _, stored, leaves = open_build(tmp_path / "tree")
    _, alone, _ = open_build(built_alone)
    assert np.array_equal(stored.embeddings[:], np.asarray(alone.embeddings)), "to the last bit"
    rows = np.random.default_rng(0).permutation(len(leaves))[:20]
    assert np.array_equal(stored.embeddings[rows], np.asarray(alone.embeddings)[rows])
    assert stored.embeddings.shape == alone.embeddings.shape
    assert stored.label_names == alone.label_names and tree.sizes is not None
    assert stored.corpus is None


@pytest.mark.parametrize("tasks", [3, 90])
def test_windows_are_assigned_by_as_many_tasks_as_there_are(
    embed, run_tasks, built_alone, tmp_path, monkeypatch, tasks
):
    run_tasks(embed(), 2)
    embeddings, tree = str(tmp_path / "embeddings"), str(tmp_path / "tree")
    for level in range(1, OPTIONS.levels + 1):
        for rank in range(tasks):
            ClusterLevel(embeddings, tree, level, OPTIONS).run(rank=rank, world_size=tasks)
        steps = [AssignWindows(tree, level, OPTIONS) for _ in range(tasks)]
        for rank in reversed(range(tasks)):
            steps[rank].run(rank=rank, world_size=tasks)
        windows = open_windows(tmp_path / "tree" / "windows").documents
        assert sum(step.stats["windows"].total for step in steps) == len(windows)
        again = AssignWindows(tree, level, OPTIONS)
        again.run(rank=0, world_size=tasks)
        assert again.stats["windows"].total == 0, "what is done is not done again"

    def nobody(*_):
        raise AssertionError("the last step clusters and assigns nothing")

    for name in ("kmeans", "nearest"):
        monkeypatch.setattr(f"midus_hf.topics.building.{name}", nobody)
    BuildTree(embeddings, tree, OPTIONS).run()
    assert_same_tree(tmp_path / "tree", built_alone)
    assert not (tmp_path / "tree" / "windows" / "clustering").exists()


def test_levels_that_are_not_done_are_missed(embed, run_tasks, tmp_path):
    run_tasks(embed(), 2)
    embeddings, tree = str(tmp_path / "embeddings"), str(tmp_path / "tree")

    def refused(step, message):
        with pytest.raises(ValueError, match=message):
            step.run()

    first, second = (ClusterLevel(embeddings, tree, level, OPTIONS) for level in (1, 2))
    refused(second, r"windows are not all assigned to nodes of level 1; .* Run AssignWindows of that")
    refused(
        AssignWindows(tree, 1, OPTIONS),
        r"no centroids of level 1 below node 0; expected the centroids that ClusterLevel",
    )
    first.run()
    AssignWindows(tree, 1, OPTIONS).run(rank=1, world_size=2)
    refused(second, "windows are not all assigned to nodes of level 1; expected the parts of all tasks")
    other_options = TreeOptions(branching=3, levels=3, samples=50)
    refused(
        AssignWindows(tree, 1, other_options), "no centroids of these embeddings and options; .* with the same options"
    )
    refused(AssignWindows(tree, 3, OPTIONS), "level is 3; expected a level of the tree, from 1 to 2")
    BuildTree(embeddings, tree, OPTIONS).run()
    assert open_build(tmp_path / "tree")[0].levels == 2, "what tasks have not done, the last step does"


def test_without_sources_windows_are_in_the_order_of_tasks(embed, run_tasks, tmp_path):
    step = embed(source_key=None, label_key=None)
    run_tasks(step, 2)
    build_from_embeddings(tmp_path / "embeddings", tmp_path / "tree", OPTIONS)
    expected = np.concatenate([np.load(tmp_path / "embeddings" / f"0000{rank}" / "embeddings.npy") for rank in (0, 1)])
    _, stored, _ = open_build(tmp_path / "tree")
    assert np.array_equal(stored.embeddings[:], expected) and stored.labels is None
    assert stored.documents[0] == 0 and set(np.diff(stored.documents)) == {0, 1}


def test_a_task_goes_on_where_it_was(embed, run_tasks, interrupted, tmp_path, monkeypatch):
    monkeypatch.setattr(window_writer, "_STRETCH", 16)
    run_tasks(embed("whole"), 1)
    with interrupted(1, window_writer, "write_record"):
        run_tasks(embed("resumed"), 1)
    step = embed("resumed")
    run_tasks(step, 1)
    whole, resumed = digests(tmp_path / "whole"), digests(tmp_path / "resumed")
    assert list(whole.values()) == list(resumed.values()) and len(whole) == 4
    run_tasks(embed("resumed"), 1)
    assert digests(tmp_path / "resumed") == resumed


def documents_of(count: int, first: int = 0) -> list[Document]:
    return [Document(f"w{first + number} w1 w2", str(number)) for number in range(count)]


def test_a_task_refuses_other_documents_than_it_began_with(embed, interrupted, monkeypatch):
    monkeypatch.setattr(window_writer, "_STRETCH", 4)
    given = {"label_key": None, "source_key": None}
    with interrupted(2, window_writer, "write_record"):
        embed(**given).run(documents_of(20))
    for documents in (documents_of(20, first=1), documents_of(7), documents_of(3) + documents_of(17, first=4), []):
        with pytest.raises(ValueError, match="other documents than the first 8 that were read now; expected the same"):
            embed(**given).run(documents)
    with pytest.raises(ValueError, match=r"made with another tasks, 1; expected 2\."):
        embed(**given).run(documents_of(20), 0, 2)
    step = embed(**given)
    step.run(documents_of(20))
    assert step.stats["windows"].total == 12, "eight were there"


def test_documents_without_what_is_asked_for_are_refused(embed):
    with pytest.raises(ValueError, match=r"document '0' has None as its 'label'; expected a string or a whole number"):
        embed(source_key=None).run(documents_of(1))
    with pytest.raises(ValueError, match=r"document '0' has None as its 'file_path'; expected a string or a whole"):
        embed(label_key=None).run(documents_of(1))


def test_embeddings_that_are_not_whole_are_refused(embed, run_tasks, tmp_path, bert):
    folder, output = tmp_path / "embeddings", tmp_path / "tree"

    def refused(message):
        with pytest.raises(ValueError, match=message):
            build_from_embeddings(folder, output, OPTIONS)
        assert not output.exists(), "nothing is made"

    refused(r"has nothing of task 0; expected a folder that EmbedWindows wrote\. Run the pipeline again")
    run_tasks(embed(), 2)
    shutil.move(folder / "00001", tmp_path / "kept")
    refused(
        r"where task 1 is not complete; expected all tasks\. Run the pipeline again, which embeds what is absent\."
    )
    shutil.copytree(tmp_path / "kept", folder / "00001")
    record = json.loads((folder / "00001" / "windows.json").read_text())

    def write(**changes):
        request = record["request"] | changes.pop("request", {})
        (folder / "00001" / "windows.json").write_text(json.dumps({**record, **changes, "request": request}))

    write(complete=False)
    refused(r"where task 1 is not complete")
    write(request={"embedding_model": "another"})
    refused(r"made with another embedding_model, 'another'; expected")
    write(request={"width": 8})
    refused(r"made with another width, 8; expected 16")
    write()
    assert len(JoinedRows(folder)) > 50
    embeddings = np.load(folder / "00001" / "embeddings.npy")
    np.save(folder / "00001" / "embeddings.npy", embeddings[:, :8])
    with pytest.raises(
        ValueError, match=r"has rows of the shape \(8,\); expected \(16,\), the width of the embedding"
    ):
        build_from_embeddings(folder, output, OPTIONS)
    np.save(folder / "00001" / "embeddings.npy", embeddings[:-1])
    with pytest.raises(ValueError, match=r"has \d+ rows; expected \d+, one .*Delete its folder, and run the pipeline"):
        build_from_embeddings(folder, output, OPTIONS)


def test_the_windows_of_a_corpus_are_not_those_of_tasks(built_alone, tmp_path):
    shutil.copytree(built_alone / "windows", tmp_path / "embeddings" / "00000")
    with pytest.raises(
        ValueError, match=r"whose folder 00000 was not written by a task; expected a folder that EmbedW"
    ):
        build_from_embeddings(tmp_path / "embeddings", tmp_path / "tree", OPTIONS)


def test_rows_of_many_tasks_hold_no_files_open(embed, tmp_path):
    for rank in range(20):
        embed(label_key=None, source_key=None).run(documents_of(3, first=rank), rank, 20)
    joined = JoinedRows(tmp_path / "embeddings")
    rows = joined[:]
    held = [path for path in Path("/proc/self/fd").iterdir() if path.resolve().name == "embeddings.npy"]
    assert rows.shape == (60, 16) and not held
    expected = np.concatenate([np.load(file) for file in sorted((tmp_path / "embeddings").glob("*/embeddings.npy"))])
    assert np.array_equal(rows, expected)


def test_tasks_without_documents_make_no_tree(embed, tmp_path):
    for rank in range(2):
        embed(label_key=None).run([Document(" ", "0")], rank, 2)
    with pytest.raises(ValueError, match=r"whose 2 tasks have no document with a visible character\. Add text"):
        build_from_embeddings(tmp_path / "embeddings", tmp_path / "tree", OPTIONS)


def test_a_tree_of_other_embeddings_is_not_gone_on_with(embed, tmp_path):
    given = {"label_key": None, "source_key": None}
    embed(**given).run(documents_of(20))
    embed("others", **given).run(documents_of(20, first=20))
    first = build_from_embeddings(tmp_path / "embeddings", tmp_path / "tree", OPTIONS)
    with pytest.raises(ValueError, match=r"made with another texts, .* Choose another output, or delete this folder"):
        build_from_embeddings(tmp_path / "others", tmp_path / "tree", OPTIONS, overwrite=True)
    shutil.move(tmp_path / "embeddings", tmp_path / "moved")
    again = build_from_embeddings(tmp_path / "moved", tmp_path / "tree", OPTIONS, overwrite=True)
    assert again.fingerprint == first.fingerprint


def test_only_the_first_task_builds(tmp_path):
    assert BuildTree(str(tmp_path / "absent"), str(tmp_path / "tree")).run(None, rank=1, world_size=2) is None
