"""Atomic numbers: what blocks learn of a fact about each of 118 elements, and what is left of it while blocks are blocked.

    python -m experiments.atoms --work outputs/atoms --picture outputs/atoms/blocking.png
    python -m experiments.atoms --work outputs/atoms --arms fetched --blocked 1:0,1:1,1:2,1:4,1:8

SmolLM2-135M, frozen, with FFN memories (`hier-ffn`): `fetched` reads the blocks of each text's path in a tree of topics, `generic`
one memory as large as what `fetched` fetches, the same for all texts. Both are trained on four sentences for each element
(mendeleev), none of them in the words of the task `atomic_numbers` (appendix B). Measured are its accuracy, and the loss on the
sentences that its questions and their answers make, while the nodes that a text would fetch first are blocked for that text (figure
6b). Answers are kept in `WORK/answers`, for `python -m experiments.name_counts`. Every step is a command that a person would type,
and training is skipped where its folder is there.

Without `--tree` a tree is built of one sentence for each element. In the tree of a broad corpus nearly all elements have one path.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from benchmarks.commands import run_command, run_once
from benchmarks.tracked import Run, append, this_run
from material.elements import FACTS_FILE, QUESTIONS_FILE, elements
from material.minilm import minilm
from material.smollm2 import smollm2_135m

ATOMS_RESULTS = Path(__file__).parent / "results" / "atoms.csv"
ARMS: dict[str, tuple[str, float] | None] = {"base": None, "fetched": ("none", 0.0), "generic": ("generic", 1.0)}
"""What is read without a path, and the share of sequences that train the generic memory; nothing is trained of the base."""

_METRIC = "exact_match,first-integer"


@dataclass(frozen=True)
class Row(Run):
    """What one model measures. Rate and epochs are 0 for the base; the loss is in nats per token.

    `blocked` nodes of `level`, of `nodes` that the level has, are blocked for each text.
    """

    arm: str
    epochs: int
    rate: float
    seed: int
    fetched_parameters: int
    bank_parameters: int
    level: int
    nodes: int
    blocked: int
    accuracy: float
    loss: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models, which a later run goes on with")
    parser.add_argument("--tree", type=Path, help="tree of topics (default: it is built of the elements)")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"joined by commas (default: {','.join(ARMS)})")
    parser.add_argument("--sizes", default="[32,16]", help="of blocks, one a level of the tree (default: [32,16])")
    parser.add_argument("--epochs", type=int, default=6, help="times that each sentence is read (default: 6)")
    parser.add_argument("--rate", default="3e-3", help="of blocks (default: 3e-3)")
    parser.add_argument("--seed", type=int, default=0, help="of blocks and order (default: 0)")
    parser.add_argument(
        "--blocked",
        default="1:0,2:1,1:1,1:2,1:4",
        help="LEVEL:COUNT, best nodes that are blocked for each text, joined by commas (default: 1:0,2:1,1:1,1:2,1:4)",
    )
    parser.add_argument("--picture", type=Path, help="file to draw (default: none)")
    parser.add_argument("--no-append", action="store_true", help="print alone")
    arguments = parser.parse_args()
    if arguments.picture:
        import matplotlib.figure  # noqa: F401 - fails before anything is measured where it is missing

        arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    print("| model | blocked for each text | accuracy | loss |")
    print("|---|---|---|---|")
    rows = []
    for row in _rows(this_run("cpu"), arguments):
        rows.append(row)
        blocked = f"{row.blocked} of {row.nodes} nodes of level {row.level}" if row.blocked else "nothing"
        print(f"| {row.arm} | {blocked} | {row.accuracy:.3f} | {row.loss:.4f} |", flush=True)
        if not arguments.no_append:
            append([row], ATOMS_RESULTS)
    if arguments.picture:
        draw_blocking([asdict(row) for row in rows], arguments.picture)


def _rows(run: Run, arguments: argparse.Namespace) -> Iterator[Row]:
    work, seed = arguments.work, arguments.seed
    (work / "answers").mkdir(parents=True, exist_ok=True)
    facts = elements() / FACTS_FILE
    tree, assigned, sentences = arguments.tree or work / "tree", work / "facts.jsonl", work / "sentences.jsonl"
    if not (tree / "tree.json").is_file():
        first_of_each = work / "first-facts.jsonl"
        texts = {row["name"]: row["text"] for row in reversed(_read(facts))}
        _write(first_of_each, [{"text": text} for text in reversed(texts.values())])
        run_command("midus-cluster", "build", "--corpus", first_of_each, "--embedding-model", minilm(), "--tokenizer",
                    minilm(), "--levels", 2, "--output", tree)  # fmt: skip
    if not assigned.is_file():
        run_command("midus-cluster", "assign", "--tree", tree, "--corpus", facts, "--output", assigned, "--embedding-model",
                    minilm(), "--tokenizer", minilm())  # fmt: skip
    _write(sentences, [{"text": sentence(row["name"], row["number"])} for row in _read(elements() / QUESTIONS_FILE)])
    branching = json.loads((tree / "tree.json").read_text(encoding="utf-8"))["branching"]

    def row(model: Path, arm: str, counts: dict[str, int], level: int, blocked: int) -> Row:
        # The generic memory is what a text reads that names no path.
        fetching = ["--retriever", tree, "--block-best", f"{level}:{blocked}"] if arm == "fetched" else ["--apart"]
        answers = work / "answers" / f"{model.name}-{level}-{blocked}.jsonl"
        answers.unlink(missing_ok=True)
        words = [model, "--json", "--sequence-length", 64, "--text", sentences, "--tasks", "atomic_numbers", "--data",
                 elements(), "--answers", answers, *fetching]  # fmt: skip
        (measured,) = json.loads(run_command("midus-eval", *words))["models"]
        trained = ARMS[arm] is not None
        return Row(
            **asdict(run),
            arm=arm,
            epochs=arguments.epochs if trained else 0,
            rate=float(arguments.rate) if trained else 0.0,
            seed=seed,
            fetched_parameters=counts.get("fetched", 0),
            bank_parameters=counts.get("bank", 0),
            level=level,
            nodes=branching**level,
            blocked=blocked,
            accuracy=measured["tasks"]["atomic_numbers"][_METRIC],
            loss=math.log(measured["perplexity"]["perplexity"]),
        )

    for arm in arguments.arms.split(","):
        model, counts = smollm2_135m(), {}
        if (memory := ARMS[arm]) is not None:
            model, counts = _trained(work, assigned, arm, *memory, branching, arguments)
        # What is blocked makes no difference to a model that fetches nothing.
        for level, blocked in _pairs(arguments.blocked) if arm == "fetched" else [(1, 0)]:
            yield row(model, arm, counts, level, blocked)


def sentence(name: str, number: int) -> str:
    """What a question and its answer make."""
    return f"The atomic number of {name} is {number}."


def _trained(
    work: Path, assigned: Path, arm: str, without_ids: str, share: float, branching: int, arguments: argparse.Namespace
) -> tuple[Path, dict[str, int]]:
    """The model of an arm, which is upscaled and trained if it is not there; and the parameters that it fetches, and of its bank."""
    upscaled = work / f"{arm}-{arguments.seed}"
    trained = work / f"{upscaled.name}-{arguments.epochs}-{arguments.rate}"
    options = {"sizes": arguments.sizes, "branching": branching, "without_ids": without_ids}
    words = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
    run_once(upscaled, "upscale", "--base", smollm2_135m(), "--method", "hier-ffn", *words, "--seed", arguments.seed,
             "--output", upscaled)  # fmt: skip
    recipe = work / "recipe.yaml"
    recipe.write_text(f"corpus: {{path: {assigned}, path_column: memory_ids}}\n")
    settings = {
        "model": upscaled,
        "output": trained,
        "generic_share": share,
        "value_learning_rate": arguments.rate,
        "value_schedule": "fixed",
        "value_weight_decay": 1e-3,
        "adam_beta2": 0.95,
        "sequence_length": 128,
        "batch_size": 2,
        "document_mask": "true",
        "precision": "fp32",
        "epochs": arguments.epochs,
        "seed": arguments.seed,
    }
    run_once(trained, "midus-train", recipe, *(f"{name}={value}" for name, value in settings.items()))
    return trained, json.loads((upscaled / "upscale.json").read_text(encoding="utf-8"))["parameters"]


def _pairs(words: str) -> list[tuple[int, int]]:
    return [(int(level), int(count)) for level, _, count in (pair.partition(":") for pair in words.split(","))]


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()


_PANELS = {"accuracy": "atomic numbers, share that is right", "loss": "loss of the sentence, nats per token"}


def draw_blocking(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw accuracy and loss by the share of the bank that is blocked for each text.

    Args:
        rows: Each with `arm`, `blocked`, `nodes`, `accuracy` and `loss`. An arm that has one row, since blocking makes no difference
            to it, is a dashed line.
        path: The file to write, of a kind that matplotlib knows.
    """
    from matplotlib.figure import Figure

    shares = sorted({_share(row) for row in rows})
    figure = Figure(figsize=(10, 4), dpi=120)
    for axes, (measure, label) in zip(figure.subplots(1, 2), _PANELS.items(), strict=True):
        for index, arm in enumerate(dict.fromkeys(row["arm"] for row in rows)):
            points = sorted((_share(row), row[measure]) for row in rows if row["arm"] == arm)
            if len(points) == 1:
                axes.axhline(points[0][1], linestyle="--", color=f"C{index}", label=arm)
            else:
                # As far apart on paper, since shares are powers of the number of children.
                places = [shares.index(share) for share, _ in points]
                axes.plot(places, [value for _, value in points], "o-", color=f"C{index}", label=arm)
        axes.set_xticks(range(len(shares)), [str(share) for share in shares])
        axes.set_xlabel("share of the tree that is blocked, best nodes first")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def _share(row: dict[str, Any]) -> Fraction:
    return Fraction(row["blocked"], row["nodes"])
