"""The model that is asked, the text before its prompts, and the effect on other texts."""

import copy
import itertools
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.facts.entries import names_of
from experiments.facts.questions import WORDINGS, Question
from material.articles import articles
from midus_hf.data.corpus import read_corpus
from midus_hf.evaluation.answers import read_numbers
from midus_hf.memories.packs.glossary import entry_of, joined
from midus_hf.memories.packs.kept_readings import keep_readings
from midus_hf.memories.packs.names import NameIndex, TokenSpelling, find_names, name_of, names_in

ROWS_AT_ONCE = 30
ARTICLE_TOKENS = 256
ARTICLES_WITHOUT = 100
LISTS = (
    *(("oxygen", "iron"), ("sodium", "copper"), ("hydrogen", "gold"), ("carbon", "silver")),
    *(("neon", "zinc"), ("calcium", "tin"), ("helium", "nickel"), ("nitrogen", "cobalt")),
)
FREE = ("sodium", "iron", "helium", "gold", "uranium", "carbon", "tungsten", "argon", "mercury", "iodine")


class InFront:
    """The text before a prompt: words of each entry whose name is in it, found by string match, as packs find names.

    Args:
        entries: The entries.
        words: Words of an entry.
        follows: Whether entries that are named in an added text are added as well.
    """

    def __init__(
        self, entries: Sequence[dict[str, Any]], words: Callable[[dict[str, Any]], str], follows: bool = False
    ):
        self.entries = entries
        self.words = words
        self.follows = follows
        self.table = table_of(entries)

    def __call__(self, prompt: str) -> str:
        found = self._named(prompt)
        if self.follows:
            for each in [*found]:
                found |= self._named(self.entries[each]["text"])
        return "".join(self.words(self.entries[each]) for each in found)

    def _named(self, text: str) -> dict[int, None]:
        return dict.fromkeys(each.entry for each in find_names(self.table, text))


def table_of(entries: Sequence[dict[str, Any]]) -> NameIndex:
    """Return the names of entries, under their numbers from 0."""
    return NameIndex(name_of(number, name) for number, each in enumerate(entries) for name in names_of(each))


def the_text(entry: dict[str, Any]) -> str:
    return entry["text"] + "\n\n"


def the_name_and_text(entry: dict[str, Any]) -> str:
    return f"{names_of(entry)[0]}: {the_text(entry)}"


def the_name(entry: dict[str, Any]) -> str:
    """Return the first name on a line of its own, as `midus ask` puts it in front of a question."""
    return names_of(entry)[0] + "\n"


class Asked:
    """A model that is asked; its answers are cached for repeated prompts.

    Args:
        folder: Folder or Hub id of the model.
        dtype: Of its weights.
    """

    def __init__(self, folder: str, dtype: str = "float32"):
        self.in_front: Callable[[str], str] | None = None
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self._said: dict[tuple[str, int], str] = {}

    def behind(self, in_front: Callable[[str], str] | None) -> "Asked":
        """Return the same model, with words before its prompts."""
        other = copy.copy(self)
        other.in_front = in_front
        return other

    def give(self, entries: Sequence[dict[str, Any]]) -> None:
        """Replace the entries of a model's glossary, if it has one."""
        try:
            glossary = self.model.glossary
        except (AttributeError, ValueError):
            return
        rows = ((f"entry {number}", each) for number, each in enumerate(entries, 1))
        wanted = joined((where, entry_of(each, where)) for where, each in rows)[0].values()
        for entry in {*glossary} - {*wanted}:
            glossary.remove(entry.names[0])
        present = {*glossary}
        for entry in wanted:
            if entry not in present:
                glossary.add(entry.names, entry.text, exact=entry.exact, common_names=True)
        self._said.clear()

    def whole(self, prompt: str) -> str:
        """Return a prompt with the text before it."""
        return prompt if self.in_front is None else self.in_front(prompt) + prompt

    def answers(self, questions: Sequence[Question]) -> list[str]:
        """Return greedy continuations of questions of one kind."""
        first = questions[0]
        if first.is_chat:
            chats = [self._messages(each) for each in questions]
            prompts = self.tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        else:
            prompts = [self.whole(each.prompt) for each in questions]
        return self.continued(prompts, first.tokens)

    def _messages(self, question: Question) -> list[dict[str, str]]:
        """Return a chat up to a question, with the text before each of the user's messages."""
        said = zip(itertools.cycle(("user", "assistant")), (*question.before, question.prompt))
        return [{"role": role, "content": self.whole(text) if role == "user" else text} for role, text in said]

    def continued(self, prompts: Sequence[str], tokens: int) -> list[str]:
        """Return greedy continuations."""
        new = [*dict.fromkeys(prompt for prompt in prompts if (prompt, tokens) not in self._said)]
        with keep_readings(self.model):
            for first in range(0, len(new), ROWS_AT_ONCE):
                part = new[first : first + ROWS_AT_ONCE]
                inputs = self.tokenizer(part, return_tensors="pt", padding=True)
                pad = self.tokenizer.pad_token_id
                made = self.model.generate(**inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=pad)
                said = self.tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
                self._said |= {(prompt, tokens): answer for prompt, answer in zip(part, said, strict=True)}
        return [self._said[prompt, tokens] for prompt in prompts]

    def lists(self, entries: Sequence[dict[str, Any]]) -> dict[str, int]:
        """Return how many lines with a new name are right in lists that go on for 64 tokens, or wrong, and those of known names."""
        numbers = {each["name"]: each["number"] for each in entries}
        numbers |= {"aluminum": numbers.get("aluminium"), "cesium": numbers.get("caesium")}
        begun = [pair for pair in LISTS if numbers.keys() >= {*pair}]
        head = "A list of chemical elements with their atomic numbers:\n"
        lines = ["".join(f"- {name}: {numbers[name]}\n" for name in pair) for pair in begun]
        counts = {"right": 0, "wrong": 0, "repeated": 0}
        made = self.continued([self.whole(f"{head}{two}-") for two in lines], 64)
        for pair, text in zip(begun, made, strict=True):
            named = {*pair}
            for name, value in re.findall(r"^\W*(\w+): *(\d.*)\n", f"-{text}", re.MULTILINE):
                name = name.lower()
                said = next(read_numbers(value), None)
                is_right = said is not None and numbers.get(name) == said
                if name in named:
                    counts["repeated"] += 1
                else:
                    counts["right" if is_right else "wrong"] += 1
                named.add(name)
        return counts

    def repeats(self, entries: Sequence[dict[str, Any]]) -> float:
        """Return the share of repeated 4-grams in 120 tokens after a name."""
        names = [each["name"] for each in entries if each["name"] in FREE]
        texts = self.continued([self.whole(f"{name.capitalize()} is") for name in names], 120)
        fours = [[*zip(*(ids[at:] for at in range(4)), strict=False)] for ids in self.tokenizer(texts)["input_ids"]]
        return round(1 - sum(len({*each}) for each in fours) / max(sum(map(len, fours)), 1), 3)

    def chosen(self, entries: Sequence[dict[str, Any]], seed: int = 0) -> int:
        """Return how many numbers are likelier behind the second wording than three others, drawn from those of all entries."""
        order = random.Random(seed)
        right = 0
        for each in entries:
            others = order.sample([other["number"] for other in entries if other is not each], 3)
            prompt = WORDINGS["place"].format(name=each["name"])
            first, *rest = self.log_likelihoods([(prompt, f" {number}") for number in (each["number"], *others)])
            right += first > max(rest)
        return right

    @torch.no_grad()
    def log_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return the log-likelihood of each answer after its prompt, in nats."""
        found: list[float] = []
        for first in range(0, len(pairs), ROWS_AT_ONCE):
            part = pairs[first : first + ROWS_AT_ONCE]
            before = self.tokenizer([self.whole(prompt) for prompt, _ in part])["input_ids"]
            behind = self.tokenizer([answer for _, answer in part], add_special_tokens=False)["input_ids"]
            rows = [prompt + answer for prompt, answer in zip(before, behind, strict=True)]
            # Tokens after the end of a row do not affect earlier ones, so padding needs no mask.
            length = max(map(len, rows))
            pad = self.tokenizer.pad_token_id
            logits = self.model(torch.tensor([row + [pad] * (length - len(row)) for row in rows])).logits
            for row, prompt, answer in zip(logits, before, behind, strict=True):
                scores = F.log_softmax(row[len(prompt) - 1 : len(prompt) - 1 + len(answer)].float(), -1)
                found.append(float(scores[range(len(answer)), answer].sum()))
        return found

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the logits of a text in float32, `[T, V]`."""
        return self.model(torch.tensor([ids])).logits[0].float()


def article_ids(tokenizer: Any, entries: Sequence[dict[str, Any]]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the beginnings of articles that hold a name, and the first of those that hold none."""
    table = table_of(entries)
    piece = TokenSpelling(tokenizer).piece
    ids = tokenizer(read_corpus(str(articles()))["text"][:], verbose=False)["input_ids"]
    beginnings = [each[:ARTICLE_TOKENS] for each in ids]
    held = [any(token.opens for token in names_in(table, map(piece, each))) for each in beginnings]
    without = [each for each, has_name in zip(beginnings, held, strict=True) if not has_name]
    return [each for each, has_name in zip(beginnings, held, strict=True) if has_name], without[:ARTICLES_WITHOUT]


def changes(model: Asked, base: Asked, texts: Sequence[Sequence[int]]) -> tuple[float, int]:
    """Return the change of the loss in nats per token, and how many texts keep their logits bit for bit."""
    change = 0.0
    tokens = 0
    equal = 0
    for ids in texts:
        targets = torch.tensor(ids[1:])
        both = [each.logits(ids) for each in (model, base)]
        equal += torch.equal(*both)
        losses = [float(F.cross_entropy(logits[:-1], targets, reduction="sum")) for logits in both]
        change += losses[0] - losses[1]
        tokens += len(targets)
    return change / max(tokens, 1), equal
