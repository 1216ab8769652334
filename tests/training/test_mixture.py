"""Of several corpora each gives its share of a run, evenly, in an order that follows from the seed alone."""

import collections
import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from training.outcomes import assert_resumes, exact_log, logged
from training.tiny_run import refused, tiny_tokenizer, write_corpus
from training.two_processes import in_two_processes, write_recipe

from midus_hf.cli.training.train import main
from midus_hf.config.yaml_options import from_mapping, read_config
from midus_hf.training.data.mixture import Mixture, split_by_weights
from midus_hf.training.data.training_data import build_dataset, open_corpora
from midus_hf.training.options import TrainConfig, WeightedCorpus
from midus_hf.training.output.output_folder import add_training, check_output
from midus_hf.training.run.train import train

hypothesis = pytest.importorskip("hypothesis")
given, settings, st = hypothesis.given, hypothesis.settings, hypothesis.strategies

WEIGHTS = st.lists(st.floats(0.5, 20), min_size=1, max_size=5)


class Numbered(torch.utils.data.Dataset):
    """Sequences that are the name of their corpus and their number."""

    def __init__(self, name: int, length: int):
        self.name, self.length = name, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        assert 0 <= index < self.length
        return self.name, index


def drawn(weights, lengths, steps=1, sequences_a_step=100, seed=0) -> list[tuple[int, int]]:
    parts = [Numbered(name, length) for name, length in enumerate(lengths)]
    mixture = Mixture(parts, weights, steps, sequences_a_step, seed)
    return [mixture[index] for index in range(len(mixture))]


@settings(deadline=None)
@given(WEIGHTS, st.integers(0, 1000))
def test_numbers_split_by_weights_add_up_and_are_nearest_to_their_shares(weights, total):
    counts = split_by_weights(weights, total)
    assert sum(counts) == total
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - total * weight / sum(weights)) < 1 + 1e-9


@settings(deadline=None)
@given(WEIGHTS, st.integers(100, 400), st.integers(0, 3))
def test_each_corpus_has_its_share_of_a_run_and_of_every_beginning_of_it(weights, total, seed):
    hypothesis.assume(min(split_by_weights(weights, total)) > 0)  # a corpus without a sequence is refused
    names = [name for name, _ in drawn(weights, [7] * len(weights), 1, total, seed)]
    counts = split_by_weights(weights, total)
    so_far: collections.Counter = collections.Counter()
    for number, name in enumerate(names, start=1):
        so_far[name] += 1
        for other, count in enumerate(counts):
            assert abs(so_far[other] - number * count / total) <= len(weights)
    assert [so_far[name] for name in range(len(weights))] == counts


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 3))
def test_a_corpus_is_gone_through_before_it_begins_again_each_time_in_another_order(first, second, seed):
    taken = drawn([1, 2], [first, second], 1, 150, seed)
    for name, length, count in ((0, first, 50), (1, second, 100)):
        indices = [index for of, index in taken if of == name]
        assert len(indices) == count
        passes = [indices[begin : begin + length] for begin in range(0, count, length)]
        assert all(sorted(whole) == list(range(length)) for whole in passes[: count // length])
        assert len(set(passes[-1])) == len(passes[-1])
        if length >= 12 and count >= 2 * length:
            assert passes[0] != passes[1]


def test_the_order_follows_from_the_seed():
    orders = [drawn([1, 3], [40, 40], seed=seed) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_a_share_of_less_than_a_sequence_is_refused():
    with refused(r"corpus\[1\]\.weight is 0\.001, less than one of the 100 sequences of the run; rai"):
        drawn([1, 0.001], [5, 5])


NEEDED = {"model_name_or_path": "m", "output_dir": "o"}


def test_a_file_and_words_may_list_corpora(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text(
        "model_name_or_path: m\noutput_dir: o\ncorpus:\n"
        "- {path: a, weight: 3}\n- path: b\n  weight: 0.5\n  column: body\n"
    )
    two = [WeightedCorpus(path="a", weight=3.0), WeightedCorpus(path="b", weight=0.5, column="body")]
    assert read_config(TrainConfig, path).corpus == two
    words = ["corpus=[{path: c, weight: 1}, {path: d/e, split: test, weight: 2e0}]"]
    assert read_config(TrainConfig, path, words).corpora == [
        WeightedCorpus(path="c", weight=1.0),
        WeightedCorpus(path="d/e", split="test", weight=2.0),
    ]
    assert from_mapping(TrainConfig, yaml.safe_load(path.read_text())).corpus == two
    with refused(r"but 'corpus' is a list; give all of it, as corpus=\[\.\.\.\]\."):
        read_config(TrainConfig, path, ["corpus.column=x"])


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        ([], "corpus is an empty list; expected one or more corpora, each with a weight."),
        (["a"], "config has no 'corpus[0].weight'; set it in the file"),
        ([{"path": "a", "weight": 1}, {"path": "b"}], "config has no 'corpus[1].weight'"),
        ([{"path": "a", "weight": 1, "wieght": 2}], "no option 'corpus[0].wieght'. Did you mean 'weight'?"),
        ([{"path": "a", "weight": 0}], "corpus.weight is 0; expected a number above 0."),
        ([{"path": "a", "weight": -1}], "corpus.weight is -1; expected a number above 0."),
        ([{"path": "a", "weight": "much"}], "corpus[0].weight is 'much'; expected a number."),
        ([{"path": "a", "weight": float("nan")}], "corpus[0].weight is nan; expected a number."),
        (
            [{"path": "a", "weight": 1, "streaming": True}],
            "corpus.streaming is true in a list of corpora; set it to fal",
        ),
        ({"path": "a", "weight": 1}, "config has no option 'corpus.weight'."),
        (3, "corpus.path is 3; expected a string."),
    ],
)
def test_a_wrong_list_of_corpora_is_refused(corpus, message):
    with refused(re.escape(message)):
        from_mapping(TrainConfig, {**NEEDED, "corpus": corpus})


@pytest.fixture
def mixed(config_for, corpus, tmp_path):
    """Gives a run of 20 steps on two corpora, three of whose four sequences are from the shorter one."""
    short = write_corpus(tmp_path / "short", documents=2, length=40)
    (short / "table.csv").touch()

    def config(name: str, **changes) -> TrainConfig:
        made = config_for(name, **changes)
        made.corpus = [WeightedCorpus(path=str(corpus), weight=1), WeightedCorpus(path=str(short), weight=3)]
        return made

    return config


def test_a_run_says_what_it_draws_from_each_corpus_and_resumes_exactly(mixed, capsys):
    log = exact_log(assert_resumes(mixed, 8, gradient_accumulation_steps=2, max_steps=20))
    printed = capsys.readouterr().out
    assert "20 documents, 1,220 tokens: 76 sequences of 16 (4 tokens left over)\n" in printed
    assert "  20 drawn (25.0% of the run), 0.26 passes\n" in printed
    assert "short; not read: 1 .csv (expected" in printed
    assert "2 documents, 82 tokens: 5 sequences of 16 (2 tokens left over)\n" in printed
    assert "  60 drawn (75.0% of the run), 12.00 passes\n" in printed
    assert len(log) == 20 and log[-1]["epoch"] == 1


def test_without_a_number_of_steps_an_epoch_is_as_many_sequences_as_all_corpora_have(mixed):
    for epochs, steps in ((None, 11), (0.5, 6), (2.0, 21)):
        result = train(
            mixed(
                f"out{epochs}",
                max_steps=None,
                num_train_epochs=epochs,
                per_device_train_batch_size=8,
                logging_steps=100,
            )
        )
        assert result.steps == steps, "81 sequences, eight a step"


def test_two_processes_take_together_what_one_takes(mixed, tmp_path):
    parts = json.dumps([{"path": part.path, "weight": part.weight} for part in mixed("out").corpus])
    recipe = write_recipe(tmp_path, Path(mixed("out").model_name_or_path), parts, max_steps=5)
    in_two_processes(recipe, "per_device_train_batch_size=1", f"output_dir={tmp_path / 'shared'}")
    assert main([str(recipe), f"output_dir={tmp_path / 'one'}"]) == 0
    shared, one = logged(tmp_path / "shared"), logged(tmp_path / "one")
    assert shared == pytest.approx(one, rel=1e-5) and len(one) == 5


def test_every_corpus_is_kept_from_the_output_and_named_in_the_card_without_its_folder(mixed, tmp_path):
    config = mixed("short/out")
    with refused(r"which lies in the corpus '.*short'; choose another folder"):
        check_output(config)
    (tmp_path / "out").mkdir()
    card = add_training(b"# A model", mixed("out"), 1, 1, None).decode()
    assert str(tmp_path) not in card
    told = yaml.safe_load(re.search(r"```yaml\n(.*)```\n$", card, flags=re.DOTALL)[1])["corpus"]
    assert [(part["path"], part["weight"]) for part in told] == [("texts", 1), ("short", 3)]


def test_in_memory_a_mixture_is_the_same(mixed, monkeypatch):
    def sequences():
        dataset = build_dataset(
            mixed("out"), open_corpora(mixed("out"), tiny_tokenizer(), 128, {}), sequences_a_step=2
        )
        return [dataset[index]["input_ids"].tolist() for index in range(len(dataset))]

    mapped = sequences()
    monkeypatch.setattr("midus_hf.training.data.training_data._can_cache", lambda: False)
    assert sequences() == mapped and len(mapped) == 40
