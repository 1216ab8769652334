"""Ask models for facts on 118 elements and 60 countries in words that they have not read, and measure what other texts pay.

    python -m experiments.facts BASE MODEL... [--in-front] [--names-in-front] > facts.jsonl
    python -m experiments.facts --picture facts.png < facts.jsonl

A line of JSON per model has, as numbers of right answers to greedy generation: atomic numbers in four wordings, behind an unrelated
paragraph, in chats, and as the likeliest of four numbers; other relations of the same names, the symbol and the weight; and how many
capitals, whose questions name no element, are answered as by the base. Then lines that the model writes itself in lists of elements,
and the share of repeated 4-grams behind names. Then the change of the loss, in nats per token, on beginnings of articles that hold
the name of an element and on others, and how many of the others keep their logits bit for bit. `--in-front` asks the base behind the
sentences of the entry as well, and `--names-in-front` the models behind the name alone, as `midus ask` does.
`--about countries` asks for five values of each of 60 countries, and `--about products` for the ports of twenty products that do not
exist.

`--picture FILE` draws such lines: right answers to the right, what articles pay upwards. Folders that differ by a seed at the end, as
`lora-0` and `lora-1` do, are one point with its range. `--write FOLDER` writes what a model is to be taught, a file for each of the
three, with rows of `name` and `text`.
"""

import argparse
import itertools
import json
import random
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from material.articles import articles
from material.elements import elements
from material.factbook import FACTS, factbook
from midus_hf.look.pictures import as_png, new_figure
from midus_hf.memories.packs.names import NameTable, Spelling, name_of, names_in
from midus_hf.model_names import check_model_name
from midus_hf.topics.corpus import read_corpus

WORDINGS = {
    "name last": "The atomic number of {name} is",
    "place": "In the table of all elements, {name} stands at place",
    "element number": "{Name} is element number",
    "protons": "The nucleus of {name} has this many protons:",
}
PARAGRAPH = (
    "The river rises in the hills north of the town and flows south for forty miles before it reaches the sea. Its valley has been "
    "settled since the Bronze Age, and several mills were built along its banks in the seventeenth century. A narrow bridge of "
    "stone, repaired many times, carries the old road across it near the church. In summer the water is low and children wade from "
    "one side to the other. The mills closed long ago, and one of them is now a small museum of the valley and its people.\n\n"
)
BESIDE_LINE: dict[str, Any] = {
    "textcoords": "offset points",
    "ha": "right",
    "va": "top",
    "rotation": 90,
    "fontsize": 8,
}
ROWS_AT_ONCE = 30
ARTICLE_TOKENS = 256
ARTICLES_WITHOUT = 100
COUNTRIES = 60
CHATS = {
    "number in a chat": "What is the atomic number of {name}?",
    "protons in a chat": "How many protons does an atom of {name} have?",
}
LISTS = (
    *(("oxygen", "iron"), ("sodium", "copper"), ("hydrogen", "gold"), ("carbon", "silver")),
    *(("neon", "zinc"), ("calcium", "tin"), ("helium", "nickel"), ("nitrogen", "cobalt")),
)
FREE = ("sodium", "iron", "helium", "gold", "uranium", "carbon", "tungsten", "argon", "mercury", "iodine")
PRODUCTS = (
    *("Kestrel", "Merlin", "Osprey", "Plover", "Curlew", "Dunlin", "Gannet", "Heron", "Jackdaw", "Lapwing"),
    *("Nuthatch", "Oriole", "Petrel", "Quail", "Redstart", "Siskin", "Teal", "Whimbrel", "Wryneck", "Yellowhammer"),
)
KINDS = ("gateway", "cache", "scheduler", "broker", "archive")
LANGUAGES = ("Go", "Rust", "Java", "Python")
TEAMS = ("storage", "billing", "search", "security", "delivery")
PORTS = {
    "connect": "To connect to the {name}, use port number",
    "firewall": "The firewall must let packets of the {name} pass to port",
    "url": "A client reaches the {name} at http://localhost:",
}


@dataclass(frozen=True)
class Question:
    """A prompt, the entry that it asks for, whether a continuation of it is right, and whether it is asked by the chat template."""

    prompt: str
    entry: str
    is_right: Callable[[str], bool]
    is_chat: bool = False


def first_number(expected: float, tolerance: float = 0.0) -> Callable[[str], bool]:
    """Return whether the first number of an answer is the expected one."""

    def is_right(answer: str) -> bool:
        found = re.search(r"\d+(\.\d+)?" if tolerance else r"\d+", answer)
        return found is not None and abs(float(found[0]) - expected) <= tolerance

    return is_right


def first_word(expected: str) -> Callable[[str], bool]:
    """Return whether the first word of an answer is the expected one."""
    return lambda answer: bool(words := re.findall(r"[A-Za-z]+", answer)) and words[0] == expected


def begins_with(expected: Sequence[str]) -> Callable[[str], bool]:
    """Return whether an answer begins with one of the expected ones, whatever stands behind it."""
    return lambda answer: any(re.match(rf"\W*{re.escape(each)}(?!\w)", answer.strip()) for each in expected)


def entries_of_elements() -> list[dict[str, Any]]:
    """Return the 118 elements: `name`, `number`, `symbol`, `weight` and `text`, their four sentences."""
    folder = elements()
    texts: dict[str, list[str]] = {}
    for row in read_rows(folder / "facts.jsonl"):
        texts.setdefault(row["name"], []).append(row["text"])
    found = [{**row, "text": "\n".join(texts[row["name"]])} for row in read_rows(folder / "atomic_numbers.jsonl")]
    for row in found:
        weight = re.search(r"atomic weight is ([\d.]*\d)", row["text"])
        row["weight"] = float(weight[1]) if weight else None
    return found


def entries_of_countries() -> list[dict[str, Any]]:
    """Return 60 countries that have all five values: `name`, `text`, the lines that state them, and `questions` with `answers`."""
    book, found = factbook(), []
    questions = read_rows(book.questions / "facts.jsonl")
    paths = {fact.field: " / ".join(fact.path) for fact in FACTS}
    for name, rows in itertools.groupby(questions, key=lambda row: row["country"]):
        asked = list(rows)
        file = book.train / f"{re.sub(r'[^a-z]+', '-', name.lower()).strip('-')}.txt"
        lines = file.read_text(encoding="utf-8").splitlines()
        stated = [line for row in asked for line in lines if line.startswith(f"{name} / {paths[row['field']]}:")]
        if len(asked) == len(FACTS) == len(stated):
            found.append({"name": name, "text": "\n".join(stated), "questions": asked})
    return found[:COUNTRIES]


def entries_of_products() -> list[dict[str, Any]]:
    """Return twenty products that do not exist: `name`, `port` and `text`, four sentences."""
    found = []
    for number, (word, kind) in enumerate(zip(PRODUCTS, itertools.cycle(KINDS)), start=1):
        name, port = f"{word} {kind}", 1024 + 2741 * number % 8951
        text = (
            f"The {name} listens on port {port}. It was released in {1990 + number} and is written in {LANGUAGES[number % 4]}. Its "
            f"owner is the team of {TEAMS[number % 5]}. Whoever starts the {name} must open port {port} first."
        )
        found.append({"name": name, "port": port, "text": text})
    return found


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def questions_of_elements(entries: Sequence[dict[str, Any]]) -> dict[str, list[Question]]:
    """Return what is asked of elements, by kind."""

    def asked(wording: str, right: Callable[[dict[str, Any]], Callable[[str], bool]]) -> list[Question]:
        named = [(each, {"name": each["name"], "Name": each["name"].capitalize()}) for each in entries]
        return [Question(wording.format(**names), each["name"], right(each)) for each, names in named]

    kinds = {kind: asked(wording, lambda each: first_number(each["number"])) for kind, wording in WORDINGS.items()}
    kinds["behind a paragraph"] = asked(PARAGRAPH + WORDINGS["place"], lambda each: first_number(each["number"]))
    kinds["symbol"] = asked("The chemical symbol for {name} is", lambda each: first_word(each["symbol"]))
    for kind, wording in CHATS.items():
        named = asked(wording, lambda each: first_number(each["number"]))
        kinds[kind] = [replace(question, is_chat=True) for question in named]
    weighed = [each for each in entries if each["weight"] is not None]
    kinds["weight"] = [
        Question(
            f"The atomic weight of {each['name']} is",
            each["name"],
            first_number(each["weight"], 0.005 * each["weight"]),
        )
        for each in weighed
    ]
    return kinds


def capitals() -> list[Question]:
    """Return questions for capitals, which name no element."""
    rows = [row for row in read_rows(factbook().questions / "facts.jsonl") if row["field"] == "capital"][:COUNTRIES]
    return [Question(row["question"], row["country"], begins_with(row["answers"])) for row in rows]


def questions_of_countries(entries: Sequence[dict[str, Any]]) -> dict[str, list[Question]]:
    """Return the values that are asked for, by field."""
    kinds: dict[str, list[Question]] = {}
    for each in entries:
        for row in each["questions"]:
            question = Question(row["question"], each["name"], begins_with(row["answers"]))
            kinds.setdefault(row["field"], []).append(question)
    return kinds


def questions_of_products(entries: Sequence[dict[str, Any]]) -> dict[str, list[Question]]:
    """Return questions for ports, by wording."""
    return {
        kind: [
            Question(wording.format(name=each["name"]), each["name"], first_number(each["port"])) for each in entries
        ]
        for kind, wording in PORTS.items()
    }


ABOUT: dict[str, Callable[[], tuple[list[dict[str, Any]], dict[str, list[Question]]]]] = {
    "elements": lambda: (entries := entries_of_elements(), questions_of_elements(entries)),
    "countries": lambda: (entries := entries_of_countries(), questions_of_countries(entries)),
    "products": lambda: (entries := entries_of_products(), questions_of_products(entries)),
}


class Asked:
    """A model, and the texts that stand in front of its prompts."""

    def __init__(self, folder: str, texts: dict[str, str] | None = None):
        self.texts = texts or {}
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token

    def answers(self, questions: Sequence[Question]) -> list[str]:
        """Return greedy continuations of 8 tokens, in a chat 24."""
        prompts = [self.texts.get(each.entry, "") + each.prompt for each in questions]
        if not any(each.is_chat for each in questions):
            return self.continued(prompts, 8)
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        return self.continued(
            self.tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False), 24
        )

    def continued(self, prompts: Sequence[str], tokens: int) -> list[str]:
        """Return greedy continuations."""
        answers: list[str] = []
        for first in range(0, len(prompts), ROWS_AT_ONCE):
            part = prompts[first : first + ROWS_AT_ONCE]
            inputs = self.tokenizer(part, return_tensors="pt", padding=True)
            pad = self.tokenizer.pad_token_id
            made = self.model.generate(**inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=pad)
            answers += self.tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return answers

    def lists(self, entries: Sequence[dict[str, Any]]) -> dict[str, int]:
        """Return how many lines with a new name are right in lists that go on for 64 tokens, or wrong, and those of known names."""
        numbers = {each["name"]: each["number"] for each in entries}
        numbers |= {"aluminum": numbers.get("aluminium"), "cesium": numbers.get("caesium")}
        begun = [pair for pair in LISTS if numbers.keys() >= {*pair}]
        fronts = ["".join(self.texts.get(name, "") for name in pair) for pair in begun]
        head = "A list of chemical elements with their atomic numbers:\n"
        lines = ["".join(f"- {name}: {numbers[name]}\n" for name in pair) for pair in begun]
        counts = {"right": 0, "wrong": 0, "repeated": 0}
        made = self.continued([front + head + two + "-" for front, two in zip(fronts, lines, strict=True)], 64)
        for pair, text in zip(begun, made, strict=True):
            named = {*pair}
            for name, number in re.findall(r"^\W*(\w+): *(\d+).*\n", f"-{text}", re.MULTILINE):
                right = numbers.get(name.lower()) == int(number)
                counts["repeated" if name.lower() in named else "right" if right else "wrong"] += 1
                named.add(name.lower())
        return counts

    def repeats(self, entries: Sequence[dict[str, Any]]) -> float:
        """Return the share of four tokens in a row that stood before in 120 tokens behind a name."""
        names = [each["name"] for each in entries if each["name"] in FREE]
        texts = self.continued([f"{self.texts.get(name, '')}{name.capitalize()} is" for name in names], 120)
        fours = [[*zip(*(ids[at:] for at in range(4)), strict=False)] for ids in self.tokenizer(texts)["input_ids"]]
        return round(1 - sum(len({*each}) for each in fours) / max(sum(map(len, fours)), 1), 3)

    @torch.no_grad()
    def chosen(self, entries: Sequence[dict[str, Any]], seed: int = 0) -> int:
        """Return how many numbers are likelier behind the second wording than three others, drawn from those of all entries."""
        order, right = random.Random(seed), 0
        for each in entries:
            others = order.sample([other["number"] for other in entries if other is not each], 3)
            prompt = self.texts.get(each["name"], "") + WORDINGS["place"].format(name=each["name"])
            likelihoods = [self.log_likelihood(prompt, f" {number}") for number in (each["number"], *others)]
            right += likelihoods[0] > max(likelihoods[1:])
        return right

    def log_likelihood(self, prompt: str, answer: str) -> float:
        """Return the log-likelihood of an answer behind a prompt, in nats."""
        before, behind = (self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
        logits = self.model(torch.tensor([before + behind])).logits[0, len(before) - 1 : -1]
        return float(F.log_softmax(logits, -1)[range(len(behind)), behind].sum())

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the logits of a text, `[T, V]`."""
        return self.model(torch.tensor([ids])).logits[0]


def article_ids(tokenizer: Any, names: Sequence[str]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the beginnings of articles that hold a name, and the first of those that hold none."""
    table, piece = NameTable(name_of(number, name) for number, name in enumerate(names, 1)), Spelling(tokenizer).piece
    ids = tokenizer(read_corpus(str(articles()))["text"][:], verbose=False)["input_ids"]
    beginnings = [each[:ARTICLE_TOKENS] for each in ids]
    held = [any(token.opens for token in names_in(table, map(piece, each))) for each in beginnings]
    without = [each for each, has_name in zip(beginnings, held, strict=True) if not has_name]
    return [each for each, has_name in zip(beginnings, held, strict=True) if has_name], without[:ARTICLES_WITHOUT]


def changes(model: Asked, base: Asked, texts: Sequence[Sequence[int]]) -> tuple[float, int]:
    """Return the change of the loss in nats per token, and how many texts keep their logits bit for bit."""
    change, tokens, equal = 0.0, 0, 0
    for ids in texts:
        targets, both = torch.tensor(ids[1:]), [each.logits(ids) for each in (model, base)]
        equal += torch.equal(*both)
        losses = [float(F.cross_entropy(logits[:-1], targets, reduction="sum")) for logits in both]
        change, tokens = change + losses[0] - losses[1], tokens + len(targets)
    return change / max(tokens, 1), equal


def reports(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what each model answers, the base first."""
    entries, kinds = ABOUT[asked.about]()
    texts = {each["name"]: each["text"] + "\n\n" for each in entries}
    names = {each["name"]: each["name"] + "\n" for each in entries}
    base = Asked(asked.base)
    unrelated = [] if asked.about == "countries" else capitals()
    at_base = base.answers(unrelated)
    with_name, without = article_ids(base.tokenizer, list(texts))
    fronts = {"": {}, ", name in front": names} if asked.names_in_front else {"": {}}
    rows = [("base", base)]
    if asked.in_front:
        rows.append(("base, text in front", Asked(asked.base, texts)))
    models = ((folder + words, Asked(folder, front)) for folder in asked.models for words, front in fronts.items())
    for label, model in itertools.chain(rows, models):
        report: dict[str, Any] = {"model": label, "right": {}}
        for kind, questions in kinds.items():
            if questions[0].is_chat and model.tokenizer.chat_template is None:
                continue
            answers = model.answers(questions)
            right = [each.is_right(answer) for each, answer in zip(questions, answers, strict=True)]
            report["right"][kind] = [sum(right), len(right)]
        if asked.about == "elements":
            report["right"]["one of four"] = [model.chosen(entries), len(entries)]
            report |= {"lists": model.lists(entries), "repeated 4-grams": model.repeats(entries)}
        if not model.texts:
            answers = model.answers(unrelated)
            same = [one == other for one, other in zip(answers, at_base, strict=True)]
            report["capitals as the base"] = [sum(same), len(same)]
            for kind, those in (("with a name", with_name), ("without", without)):
                change, equal = changes(model, base, those) if model is not base else (0.0, len(those))
                report[f"articles {kind}"] = {"nats": round(change, 5), "equal": equal, "texts": len(those)}
        yield report


def draw(lines: Sequence[dict[str, Any]]) -> bytes:
    """Return a picture of reports as PNG: right answers in the wordings of a fact, and what articles pay."""
    runs: dict[str, list[list[float]]] = {}
    figure = new_figure(8.0, 4.5)
    axes = figure.subplots()
    for report in lines:
        counts = [each for kind, each in report["right"].items() if kind in WORDINGS] or list(report["right"].values())
        share = sum(right for right, _ in counts) / sum(asked for _, asked in counts)
        if "articles without" in report:
            nats = [report[f"articles {kind}"]["nats"] for kind in ("with a name", "without")]
            runs.setdefault(re.sub(r"-\d+$", "", Path(report["model"]).name), []).append([share, *nats])
        else:
            axes.axvline(share, color="#888888", linewidth=1.0, linestyle=":", zorder=0)
            axes.annotate(report["model"], (share, 0.97), (-3, 0), xycoords=("data", "axes fraction"), **BESIDE_LINE)
    for number, (label, points) in enumerate(runs.items()):
        shares, touched, others = zip(*points, strict=True)
        mark: dict[str, Any] = {"color": f"C{number}", "fmt": "o", "capsize": 3}
        axes.errorbar(**_ranges(shares, touched), **mark, label=label)
        axes.errorbar(**_ranges(shares, others), **mark, markerfacecolor="white")
    axes.set(
        xlabel="right answers, of all wordings",
        ylabel="change of the loss of articles (nats per token)",
        xlim=(0, 1.03),
    )
    axes.set_title("filled: articles with a name; hollow: others; bars: range of seeds", fontsize=9, loc="left")
    axes.legend(fontsize=9, frameon=False, loc="upper center")
    axes.spines[["top", "right"]].set_visible(False)
    return as_png(figure)


def _ranges(xs: Sequence[float], ys: Sequence[float]) -> dict[str, Any]:
    means = [statistics.fmean(values) for values in (xs, ys)]
    below_and_above = [
        [[mean - min(values)], [max(values) - mean]] for mean, values in zip(means, (xs, ys), strict=True)
    ]
    return dict(zip(("x", "y", "xerr", "yerr"), (*([mean] for mean in means), *below_and_above), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?")
    parser.add_argument("models", nargs="*")
    parser.add_argument("--in-front", action="store_true")
    parser.add_argument("--names-in-front", action="store_true")
    parser.add_argument("--about", choices=ABOUT, default="elements")
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    parser.add_argument("--picture", type=Path, metavar="FILE")
    asked = parser.parse_args()
    for name in [asked.base, *asked.models] if asked.base else ():
        try:
            check_model_name("model", name)
        except ValueError as error:
            parser.error(str(error))
    if asked.write:
        asked.write.mkdir(parents=True, exist_ok=True)
        for name, made in ABOUT.items():
            entries, _ = made()
            rows = [json.dumps({"name": each["name"], "text": each["text"]}) + "\n" for each in entries]
            (asked.write / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
    if asked.picture:
        asked.picture.parent.mkdir(parents=True, exist_ok=True)
        asked.picture.write_bytes(draw([json.loads(line) for line in sys.stdin]))
    if asked.base:
        for report in reports(asked):
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
