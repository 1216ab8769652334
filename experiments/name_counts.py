"""How often names occur in a corpus, and how accuracy depends on it.

    python -m experiments.name_counts --corpus glosses.jsonl --questions "$(python -m material elements)/atomic_numbers.jsonl" \\
        --output counts.json
    python -m experiments.name_counts --counts counts.json --answers answers.jsonl

The first command reads a corpus once, document by document, and counts the `names` of each question as whole words in
lower or upper case. A corpus may be several files and folders. The second command puts questions into bins of equal
size, the rarest first, and prints the accuracy of each model in each bin (figure 1). Answers are files written by
`midus eval --set answers=FILE`. As in the paper, words with another meaning count too, such as the verb *lead*.
"""

import argparse
import collections
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report.rows import table
from experiments.steps import read_rows
from midus_hf.documents import find_files, iterate_documents


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, action="append", default=[], help="file or folder; repeat at will")
    parser.add_argument("--column", default="text", help="where rows hold the text (default: text)")
    parser.add_argument("--questions", type=Path, help="JSON lines with `name` and `names`")
    parser.add_argument("--output", type=Path, help="JSON file of the counts (default: they are printed)")
    parser.add_argument("--counts", type=Path, help="what --output wrote")
    parser.add_argument("--answers", type=Path, action="append", default=[], help="repeat at will")
    parser.add_argument("--metric", default="exact_match", help="of the answers (default: exact_match)")
    parser.add_argument("--bins", type=int, default=5, help="of questions (default: 5)")
    chosen = parser.parse_args(arguments)
    if chosen.corpus and chosen.questions:
        names = {row["name"]: row["names"] for row in read_rows(chosen.questions)}
        files = [file for path in chosen.corpus for file in find_files(path)]
        counts = json.dumps(count_names(iterate_documents(files, chosen.column), names), indent=1)
        if chosen.output:
            chosen.output.write_text(counts + "\n", encoding="utf-8")
        else:
            print(counts)
    elif chosen.counts and chosen.answers:
        counts = json.loads(chosen.counts.read_text(encoding="utf-8"))
        bins = bins_of(counts, chosen.bins)
        answers = [row for path in chosen.answers for row in read_rows(path)]
        print(bin_table(counts, bins, accuracies(answers, bins, chosen.metric)))
    else:
        parser.error("give --corpus and --questions to count names, or --counts and --answers for accuracies.")


def count_names(documents: Iterable[str], names: dict[str, list[str]]) -> dict[str, int]:
    """Count names in documents, which are read once."""
    owner = {alias.lower(): name for name, aliases in names.items() for alias in aliases}
    # Longer names come first: if a name begins with another name, the longer one is meant.
    pattern = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(owner, key=len, reverse=True)))})\b", re.IGNORECASE)
    counts = collections.Counter(owner[match.lower()] for text in documents for match in pattern.findall(text))
    return {name: counts[name] for name in names}


def bins_of(counts: dict[str, int], number: int) -> list[list[str]]:
    """Return bins of names, as equal in size as possible, rarest names first. Equally frequent names keep their order."""
    if not 1 <= number <= len(counts):
        raise ValueError(f"bins is {number}; expected 1 to {len(counts)}, the number of names.")
    order = sorted(counts, key=lambda name: counts[name])
    edges = [index * len(order) // number for index in range(number + 1)]
    return [order[first:last] for first, last in itertools.pairwise(edges)]


def accuracies(answers: Iterable[dict[str, Any]], bins: list[list[str]], metric: str) -> dict[str, list[float]]:
    """Return the mean of a metric in each bin, by model."""
    scores: dict[str, dict[str, float]] = {}
    for row in answers:
        if metric in row["scores"] and "name" in row["question"]:
            model, name = row["model"], row["question"]["name"]
            if name in scores.setdefault(model, {}):
                raise ValueError(f"answers of {model} have {name} twice; give those of one evaluation of each model.")
            scores[model][name] = row["scores"][metric]
    means: dict[str, list[float]] = {}
    for model, of_model in scores.items():
        for names in bins:
            held = [of_model[name] for name in names if name in of_model]
            if not held:
                raise ValueError(
                    f"answers of {model} have none of {names[0]} to {names[-1]}; give those of all questions."
                )
            means.setdefault(model, []).append(sum(held) / len(held))
    if not means:
        raise ValueError(
            f"answers have no {metric} of questions with a name; expected what midus eval --set answers=FILE wrote."
        )
    return means


def bin_table(counts: dict[str, int], bins: list[list[str]], means: dict[str, list[float]]) -> str:
    """Return a Markdown table with a row per bin."""
    lines = []
    for index, names in enumerate(bins):
        span = f"{counts[names[0]]:,} to {counts[names[-1]]:,}"
        lines.append([span, str(len(names)), *(f"{rates[index]:.3f}" for rates in means.values())])
    return table(["times in the corpus", "names", *(Path(model).name for model in means)], lines)


if __name__ == "__main__":
    main()
