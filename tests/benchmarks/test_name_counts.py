"""Names are counted in a corpus, and accuracies are given by how often they occur."""

import itertools
import json

import pytest

from benchmarks.name_counts import accuracies, bins_of, count_names, main

NAMES = {"tin": ["tin", "stannum"], "sulfur": ["sulfur", "sulphur"], "lead": ["lead", "plumbum"], "iron": ["iron"]}
TEXTS = [
    "Tin, TIN and stannum; sulphur. A tincture irons nothing.",
    "They lead (lead!) iron-clad lives.",
    "leads misled",
]


def test_whole_words_count_in_whatever_case_and_by_every_name():
    assert count_names(iter(TEXTS), NAMES) == {"tin": 3, "sulfur": 1, "lead": 2, "iron": 1}
    assert count_names([], NAMES) == dict.fromkeys(NAMES, 0)


def test_of_names_that_begin_alike_the_longer_is_counted():
    assert count_names(["white gold and gold"], {"gold": ["gold"], "alloy": ["white gold"]}) == {"gold": 1, "alloy": 1}


@pytest.mark.parametrize("number", [1, 2, 3, 5, 7])
def test_bins_are_of_equal_sizes_and_the_rarest_come_first(number):
    counts = {f"n{index}": (index * 5) % 7 for index in range(7)}
    bins = bins_of(counts, number)
    assert list(itertools.chain(*bins)) == sorted(counts, key=counts.get)
    assert len(bins) == number and max(map(len, bins)) - min(map(len, bins)) <= 1


def answer(model: str, name: str, right: float) -> dict:
    return {"model": model, "question": {"name": name}, "scores": {"exact_match": right}}


def test_accuracies_are_means_within_a_bin():
    bins = [["iron", "tin"], ["lead"]]
    answers = [answer("a", "tin", 1.0), answer("a", "iron", 0.0), answer("a", "lead", 1.0)]
    answers += [answer("b", name, 0.0) for name in ("tin", "iron", "lead")]
    answers.append({"model": "a", "question": {"question": "a task of another kind"}, "scores": {"acc": 1.0}})
    assert accuracies(answers, bins, "exact_match") == {"a": [0.5, 1.0], "b": [0.0, 0.0]}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bins_of(NAMES, 5), r"bins is 5; expected 1 to 4, the number of names"),
        (lambda: bins_of(NAMES, 0), r"bins is 0; expected 1 to 4"),
        (
            lambda: accuracies([answer("a", "tin", 1.0)], [["iron", "lead"]], "exact_match"),
            r"answers of a have none of iron to lead; give those of all questions",
        ),
        (
            lambda: accuracies([answer("a", "tin", 1.0), answer("a", "tin", 0.0)], [["tin"]], "exact_match"),
            r"answers of a have tin twice; give those of one evaluation of each model",
        ),
        (
            lambda: accuracies([answer("a", "tin", 1.0)], [["tin"]], "acc"),
            r"answers have no acc of questions with a name; expected what midus-eval --answers wrote",
        ),
    ],
    ids=["many-bins", "no-bins", "absent", "twice", "metric"],
)
def test_what_cannot_be_told_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_command_counts_in_files_and_tells_of_answers(tmp_path, capsys):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "b.txt").write_text("plumbum")
    (tmp_path / "questions.jsonl").write_text(
        "".join(json.dumps({"name": name, "names": names}) + "\n" for name, names in NAMES.items())
    )
    corpora = ["--corpus", str(tmp_path / "corpus"), "--corpus", str(tmp_path / "b.txt")]
    counts = str(tmp_path / "counts.json")
    main([*corpora, "--questions", str(tmp_path / "questions.jsonl"), "--output", counts])
    (tmp_path / "answers.jsonl").write_text(
        "".join(json.dumps(answer("folder/a", name, float(name == "tin"))) + "\n" for name in NAMES)
    )
    main(["--counts", counts, "--answers", str(tmp_path / "answers.jsonl"), "--bins", "2"])
    assert capsys.readouterr().out.splitlines() == [
        "| times in the corpus | names | a |",
        "|---|---|---|",
        "| 1 to 1 | 2 | 0.000 |",
        "| 3 to 3 | 2 | 0.500 |",
    ]
    with pytest.raises(SystemExit):
        main(["--corpus", str(tmp_path)])
    assert "give --corpus and --questions to count names, or --counts and --answers" in capsys.readouterr().err
