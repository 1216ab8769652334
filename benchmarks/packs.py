"""Measure the time to the first token of an answer: the base, a text in the prompt, and packs.

    python -m benchmarks.packs                                        # SmolLM2-135M-Instruct, texts of 32, 128 and 512 tokens
    python -m benchmarks.packs --base FOLDER --texts 32,128 --rounds 5

A glossary has an entry of each length, and a question names one in a chat. Variants are measured by turns, in one thread; an entry
that is *kept* was read before, by `keep_readings`, as `midus ask` reads it, or *compared*: with all numbers of the weights compared.
A second question is asked after an answer of 16 tokens, *whole* or as a conversation of `midus ask` goes on. Seconds are medians, and
so are ratios to the text in front in the same round. Rows are appended to `results/packs.csv`.
"""

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import RESULTS, Row, command_line, numbers, run_columns, tell
from material.fetch import FETCH
from midus_hf.evaluation.asking import Conversation, greedy_answer, question_inputs
from midus_hf.memories.packs.kept_readings import keep_readings
from midus_hf.models.saved_models import load_for_reading
from upscalers.runs.upscale import upscale

IN_FRONT = "text in front"
_NAME = "Kestrel gateway {tokens}"
_QUESTION = "On which port does the {name} listen when it is started by hand?"
_NEXT_QUESTION = "And which team looks after it?"
_WORDS = (
    "port team cache server reads writes old new north south blue seven forty listens keeps sends rack key".split()
)
_ANSWER_TOKENS = 16
COLUMNS = {
    "tokens of text": "{tokens}",
    "variant": "{variant}",
    "seconds": "{seconds:.3f}",
    f"of {IN_FRONT}": "{of_front:.2f}",
}


def text_of(tokenizer: Any, tokens: int) -> str:
    """Return an entry's text of that many tokens."""
    choice = random.Random(tokens)
    text = "The gateway " + " ".join(choice.choices(_WORDS, k=tokens))
    return tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"][:tokens])


@dataclass(frozen=True)
class Asker:
    """A model that is asked in chats."""

    model: Any
    tokenizer: Any

    def inputs(self, message: str, chat: tuple[str, ...] = ()) -> Any:
        """Return the ids of a message in a chat after others of both sides."""
        roles = ("user", "assistant")
        turns = [{"role": roles[at % 2], "content": said} for at, said in enumerate(chat)]
        return question_inputs(self.model, self.tokenizer, message, name="the model", chat=turns)

    def first_token(self, message: str, is_read: bool = False) -> float:
        """Return seconds to the first token; if `is_read`, what the question opens was read before."""
        inputs = self.inputs(message)
        if is_read:
            greedy_answer(self.model, inputs, 1)
        return _seconds(lambda: greedy_answer(self.model, inputs, 1))

    def kept_first_token(self, message: str, compares: bool) -> float:
        """Return seconds to the first token where what the question opens is kept."""
        with keep_readings(self.model, check_numbers=compares):
            return self.first_token(message, is_read=True)

    def second_token(self, message: str, goes_on: bool) -> float:
        """Return seconds to the first token of a second answer."""
        with keep_readings(self.model, check_numbers=False):
            conversation = Conversation(self.model)
            answer = conversation.answer(self.inputs(message), _ANSWER_TOKENS)
            said = self.tokenizer.decode(answer, skip_special_tokens=True)
            inputs = self.inputs(_NEXT_QUESTION, (message, said))
            if not goes_on:
                conversation = Conversation(self.model)
            return _seconds(lambda: conversation.answer(inputs, 1))


def _seconds(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def variants(base: Asker, packs: Asker, tokens: int, text: str) -> dict[str, Callable[[], float]]:
    """Return what is measured, by its name, for a text of some tokens."""
    name = _NAME.format(tokens=tokens)
    question = _QUESTION.format(name=name)
    named, fronted = f"{name}\n{question}", f"{text}\n\n{question}"
    measured: dict[str, Callable[[], float]] = {
        "base": lambda: base.first_token(question),
        IN_FRONT: lambda: base.first_token(fronted),
    }
    for label, message in (("packs", question), ("packs, name in front", named)):
        measured |= {
            label: lambda message=message: packs.first_token(message),
            f"{label}, kept": lambda message=message: packs.kept_first_token(message, compares=False),
            f"{label}, kept and compared": lambda message=message: packs.kept_first_token(message, compares=True),
        }
    for label, asker, message in ((IN_FRONT, base, fronted), ("packs, name in front", packs, named)):
        measured |= {
            f"second question, {label}, whole": lambda asker=asker, message=message: asker.second_token(
                message, False
            ),
            f"second question, {label}": lambda asker=asker, message=message: asker.second_token(message, True),
        }
    return measured


def rows(base: str, lengths: list[int], rounds: int) -> Iterator[Row]:
    """Yield a row per text and variant."""
    plain = Asker(*load_for_reading(base, "float32", "cpu"))
    texts = {tokens: text_of(plain.tokenizer, tokens) for tokens in lengths}
    with tempfile.TemporaryDirectory() as folder:
        corpus, output = Path(folder, "glossary.jsonl"), Path(folder, "packs")
        entries = [{"name": _NAME.format(tokens=tokens), "text": text} for tokens, text in texts.items()]
        corpus.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        options = {"corpus": str(corpus), "max_tokens": max(lengths) + 8}
        upscale(base=base, method="packs", options=options, output=output, verify=False)
        packs = Asker(*load_for_reading(str(output), "float32", "cpu"))
    for tokens, text in texts.items():
        measured = variants(plain, packs, tokens, text)
        times: dict[str, list[float]] = {variant: [] for variant in measured}
        for each in range(rounds + 1):
            for variant, measure in measured.items():
                seconds = measure()
                if each:  # the first round warms up
                    times[variant].append(seconds)
        for variant, seconds in times.items():
            reference = times[IN_FRONT if "second" not in variant else f"second question, {IN_FRONT}, whole"]
            ratios = [one / other for one, other in zip(seconds, reference, strict=True)]
            yield {
                "base": Path(base).name,
                "tokens": tokens,
                "variant": variant,
                "rounds": rounds,
                "seconds": statistics.median(seconds),
                "of_front": statistics.median(ratios),
            }


def main(command_arguments: list[str] | None = None, results: Path = RESULTS / "packs.csv") -> int:
    """Measure what the command line names; return 0."""
    parser = command_line(__doc__)
    parser.add_argument("--base", help="folder or Hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--texts", type=numbers, default=[32, 128, 512], help="their tokens (default: 32,128,512)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of all variants (default: 9)")
    arguments = parser.parse_args(command_arguments)
    base = arguments.base or str(FETCH["smollm2"]())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = rows(base, arguments.texts, arguments.rounds)
        tell(found, COLUMNS, None if arguments.no_append else results, run_columns())
    finally:
        torch.set_num_threads(threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
