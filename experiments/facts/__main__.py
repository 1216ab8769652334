"""Ask models for facts in words that they have not seen, and measure the effect on other texts and other facts.

    python -m experiments.facts BASE MODEL... [--about KIND] [--in-front] [--names-in-front] [--dtype NAME] > facts.jsonl
    python -m experiments.facts BASE MODEL... --about beliefs --entries 1 100 1000 10000 > beliefs.jsonl
    python -m experiments.facts --picture facts.png < facts.jsonl

A line of JSON per model. `--in-front` also asks the base with the texts of the entries that a prompt names, by string match, before
the prompt, as they are and each after its name, and `--names-in-front` the models with only the names before it. A model with packs
gets the entries of the kind as its glossary, so that one serves all kinds. All answers are greedy. Numbers are right answers, and of
how many:

    elements    118 atomic numbers in four wordings, behind an unrelated paragraph, in chats, and as the likeliest of four numbers;
                other relations; lines that the model writes itself in lists, and the share of repeated 4-grams behind names
    countries   five values of each of 60 countries
    products    ports of twenty products that do not exist
    two-hop     ports and teams that stand in the text of a product which the text of the named one names
    uneven      numbers and names in twenty texts of many wordings, as people ask, alone and in chats; uneven-2: in sixteen others
    conversations    in chats, 16 each: second questions without the name, after an answer to one with it; whether an unrelated second
                question is answered as by the base; a number and a name that only a linked text has (in front are both); two entries
    code        in chats: facts of twelve functions and classes of a private interface, and lines of code that call them
    beliefs     answers of the base that were exchanged for others (see beliefs.py); `--entries` gives sizes of glossaries, which
                entries that no question names fill up, and 1 a glossary of its own for each question
    --counterfact FILE, --zsre FILE    the same of the records of a published file

Of the first three, also the change of the loss, in nats per token, on beginnings of articles with a name and without, how many of the
others keep their logits bit for bit, and how many capitals, whose questions name no element, are answered as by the base.

`--at-most N` asks so many questions of each kind and reads so many articles, spread evenly.

`--picture FILE` draws lines of the first five kinds: right answers to the right, what articles pay upwards. Folders that differ by
a seed at the end, as `lora-0` and `lora-1` do, are one point with its range. `--write FOLDER` writes what a model is to be taught,
a file for each of the first five kinds, with rows of `name` and `text`.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.facts import beliefs, questions
from experiments.facts.asked import Asked, InFront, article_ids, changes, the_name, the_name_and_text, the_text
from experiments.facts.entries import lines_of
from experiments.facts.picture import draw
from midus_hf.sources.names import check_model_name

# Kinds whose names articles and other questions may have.
WITH_ARTICLES = ("elements", "countries", "products")


def reports(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the answers of each model, the base first."""
    entries, kinds = questions.ABOUT[asked.about]()
    base = Asked(asked.base, asked.dtype)
    unrelated = [] if asked.about == "countries" else questions.capitals()
    with_name, without = article_ids(base.tokenizer, entries) if asked.about in WITH_ARTICLES else ([], [])
    with_name, without, unrelated = (_spread(each, asked.at_most) for each in (with_name, without, unrelated))
    kinds = {kind: _spread(of_kind, asked.at_most) for kind, of_kind in kinds.items()}

    def models() -> Iterator[tuple[str, Asked]]:
        yield "base", base
        if asked.in_front:
            follows = asked.about == "conversations"
            yield "base, text in front", base.behind(InFront(entries, the_text, follows))
            yield "base, NAME: TEXT in front", base.behind(InFront(entries, the_name_and_text, follows))
            if asked.about == "two-hop":
                yield "base, both texts in front", base.behind(InFront(entries, the_text, follows=True))
        for folder in asked.models:
            model = Asked(folder, asked.dtype)
            model.give(entries)
            yield folder, model
            if asked.names_in_front:
                yield f"{folder}, name in front", model.behind(InFront(entries, the_name))

    for label, model in models():
        report: dict[str, Any] = {"model": label, "right": {}}
        for kind, of_kind in kinds.items():
            if of_kind[0].is_chat and model.tokenizer.chat_template is None:
                continue
            answers = model.answers(of_kind)
            of_base = base.answers(of_kind)
            right = [
                answer == as_base if each.is_right is None else each.is_right(answer)
                for each, answer, as_base in zip(of_kind, answers, of_base, strict=True)
            ]
            report["right"][kind] = [sum(right), len(right)]
        if asked.about == "elements":
            those = _spread(entries, asked.at_most)
            report["right"]["one of four"] = [model.chosen(those), len(those)]
            report |= {"lists": model.lists(entries), "repeated 4-grams": model.repeats(entries)}
        if asked.about in WITH_ARTICLES and model.in_front is None:
            if unrelated:
                both = zip(model.answers(unrelated), base.answers(unrelated), strict=True)
                same = [one == other for one, other in both]
                report["capitals as the base"] = [sum(same), len(same)]
            for kind, those in (("with a name", with_name), ("without", without)):
                change, equal = changes(model, base, those) if model is not base else (0.0, len(those))
                report[f"articles {kind}"] = {"nats": round(change, 5), "equal": equal, "texts": len(those)}
        yield report


def _spread(items: Sequence[Any], most: int | None) -> list[Any]:
    """Return at most a number of items, evenly spread."""
    count = len(items) if most is None else min(most, len(items))
    return [items[number * len(items) // count] for number in range(count)]


def reports_of_edits(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield how far each model follows answers that are not the base's, the base first."""
    base = Asked(asked.base, asked.dtype)
    if asked.counterfact:
        edits = beliefs.edits_of_counterfact(asked.counterfact)
    else:
        edits = beliefs.edits_of_zsre(asked.zsre) if asked.zsre else beliefs.edits_of_beliefs(base)
    sizes: Sequence[int | None] = asked.entries or [None]
    for size in sizes:
        next(beliefs.glossaries(edits, size))  # refused before a model is asked

    def reports_of(label: str, model: Asked, words: Any) -> Iterator[dict[str, Any]]:
        for size in sizes:
            counts = beliefs.report(model, base, edits, size, words)
            yield {"model": label, "entries": size or len(edits), "counts": counts}

    yield {"model": "base", "counts": beliefs.report(base, base, edits)}
    if asked.in_front:
        yield from reports_of("base, text in front", base, the_text)
    for folder in asked.models:
        model = Asked(folder, asked.dtype)
        yield from reports_of(folder, model, None)
        if asked.names_in_front:
            yield from reports_of(f"{folder}, name in front", model, the_name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?")
    parser.add_argument("models", nargs="*")
    parser.add_argument("--in-front", action="store_true")
    parser.add_argument("--names-in-front", action="store_true")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--about", choices=[*questions.ABOUT, "beliefs"], default="elements")
    what.add_argument("--counterfact", type=Path, metavar="FILE")
    what.add_argument("--zsre", type=Path, metavar="FILE")
    parser.add_argument("--at-most", type=int, metavar="N")
    parser.add_argument("--entries", type=int, nargs="+", metavar="N")
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    parser.add_argument("--picture", type=Path, metavar="FILE")
    asked = parser.parse_args()
    of_edits = bool(asked.about == "beliefs" or asked.counterfact or asked.zsre)
    if asked.entries and not of_edits:
        parser.error("--entries is for beliefs; expected --about beliefs, or a file of edits")
    if asked.at_most is not None and (of_edits or asked.at_most < 1):
        parser.error(f"--at-most is {asked.at_most}; expected 1 or more questions of a kind, and not of beliefs")
    if asked.base:
        for name in [asked.base, *asked.models]:
            try:
                check_model_name("model", name)
            except ValueError as error:
                parser.error(str(error))
    if asked.write:
        asked.write.mkdir(parents=True, exist_ok=True)
        for name, made in questions.ABOUT.items():
            (asked.write / f"{name}.jsonl").write_text("".join(lines_of(made()[0])), encoding="utf-8")
    if asked.picture:
        asked.picture.parent.mkdir(parents=True, exist_ok=True)
        asked.picture.write_bytes(draw([json.loads(line) for line in sys.stdin]))
    if asked.base:
        try:
            for report in (reports_of_edits if of_edits else reports)(asked):
                print(json.dumps(report), flush=True)
        except ValueError as error:
            parser.error(str(error))


if __name__ == "__main__":
    main()
