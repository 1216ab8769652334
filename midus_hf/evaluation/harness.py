"""lm-evaluation-harness on models of this package, which may fetch blocks, and on local questions.

A local task (`tasks/*.yaml`) names its data as `${DATA}/piqa.jsonl`; the folder replaces `${DATA}` when the task is loaded.
"""

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import regex
import torch
import yaml
from lm_eval.api.task import ConfigurableTask
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from midus_hf.config.errors import RequestError
from midus_hf.data.corpus import read_rows, refuse_pointers
from midus_hf.evaluation.answers import has_answer, read_numbers
from midus_hf.evaluation.fetching import PathFinder, fetching
from midus_hf.evaluation.questions import check_facts, check_labels, check_questions
from midus_hf.sources.progress import limit_bars
from midus_hf.sources.tokenizers import check_ids

PREFIX = "midus_"
_FOLDER = Path(__file__).parent / "tasks"
_FACTS = "facts"  # name of the task whose rows are written by users
# Where a clause may end: at signs, but not within a number (1,000 or 10:30) or before a letter (.com), except for wide signs.
_CLAUSE_END = regex.compile(
    r"[,;](?!\d)|[\p{Terminal_Punctuation}--[,;]](?!\w)|[\p{Terminal_Punctuation}--\p{ASCII}]"
    r"|\p{Open_Punctuation}|\s\p{Dash}\s|\u2014|\n|$",
    regex.V1,
)


class FetchingLM(HFLM):
    """The harness's model for a loaded model, whose questions fetch the blocks of their paths."""

    def __init__(
        self,
        model: PreTrainedModel,
        find_paths: PathFinder | None = None,
        questions: Callable[[Any], str] = lambda request: request.args[0],
        **kwargs: Any,
    ):
        super().__init__(model, backend="causal", **kwargs)
        self._find_paths = find_paths
        self._questions = questions

    def loglikelihood(self, requests: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Return the harness's log-likelihoods, with the blocks of each request's question."""
        return self._with_blocks(super().loglikelihood, self._questions, requests, *args, **kwargs)

    def loglikelihood_rolling(self, requests: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Return the harness's rolling log-likelihoods, with the blocks of each whole text."""
        return self._with_blocks(super().loglikelihood_rolling, lambda one: one.args[0], requests, *args, **kwargs)

    def generate_until(self, requests: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Return the texts that the harness generates, with the blocks of each request's question."""
        return self._with_blocks(super().generate_until, self._questions, requests, *args, **kwargs)

    def _with_blocks(
        self,
        run: Callable[..., list[Any]],
        text_of: Callable[[Any], str],
        requests: list[Any],
        *args: Any,
        **kwargs: Any,
    ) -> list[Any]:
        """Run requests with the same path together, with its blocks; return the results in their order."""
        if self._find_paths is None:
            return run(requests, *args, **kwargs)
        texts = [text_of(request) for request in requests]
        different = list(dict.fromkeys(texts))
        path_of = dict(zip(different, map(tuple, self._find_paths(different).tolist()), strict=True))
        members: dict[tuple[int, ...], list[int]] = {}
        for index, text in enumerate(texts):
            members.setdefault(path_of[text], []).append(index)
        results: list[Any] = [None] * len(requests)
        for path, indices in members.items():
            with fetching(self.model, path):
                results_of_path = run([requests[index] for index in indices], *args, **kwargs)
            for index, result in zip(indices, results_of_path, strict=True):
                results[index] = result
        return results

    def _model_call(self, inps: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        check_ids(int(inps.max()), self.model.config.get_text_config().vocab_size)
        return super()._model_call(inps, *args, **kwargs)

    def _model_generate(self, context: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        check_ids(int(context.max()), self.model.config.get_text_config().vocab_size)
        return super()._model_generate(context, *args, **kwargs)


class _LocalTask(ConfigurableTask):
    """A local task. Rows are read like those of a corpus, since `datasets` turns answers into dates."""

    def __init__(self, config: dict[str, Any]):
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        files = (dataset_kwargs or {})["data_files"]
        self.dataset = {split: read_rows("data", file) for split, file in files.items()}


class Tasks:
    """Tasks to run, found by name before any model is loaded."""

    def __init__(self, names: list[str], data: str | Path | None = None, include_path: str | Path | None = None):
        local = local_task_names() if data is not None else []
        self.manager = _task_manager({*names} - {*local}, include_path)
        self.specs: list[str | dict[str, Any]] = []
        for name in names:
            if data is not None and name in local:
                self.specs.append({**load_local_task(name, data), "class": _LocalTask})
            elif name in self.manager.all_tasks:
                self.specs.append(name)
            else:
                raise RequestError(
                    f"task is {name!r}; expected a task of lm-eval ('lm_eval ls tasks' lists them), one in include_path, or, with "
                    f"the folder of their questions as data, one of {', '.join(local_task_names())}."
                )

    def run(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        num_fewshot: int | None = None,
        limit: int | None = None,
        batch_size: int = 4,
        find_paths: PathFinder | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Score a model, in eval mode and on its device, on the tasks."""
        # Random choices are seeded as by the harness's command; some tasks choose their worked examples at random.
        random.seed(DEFAULT_RANDOM_SEED)
        np.random.seed(DEFAULT_OTHER_SEED)
        torch.manual_seed(DEFAULT_OTHER_SEED)
        with limit_bars():
            loaded = self.load(limit)
        for task in loaded["tasks"].values():
            task_number = task.get_config("num_fewshot")
            if task_number is None or (task_number != 0 and num_fewshot is not None):
                task.set_config(key="num_fewshot", value=num_fewshot or 0)
            task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
        language_model = FetchingLM(
            model,
            find_paths,
            lambda request: question_of(loaded["tasks"][request.task_name], request.doc),
            tokenizer=tokenizer,
            batch_size=batch_size,
        )
        with limit_bars():
            results = evaluate(language_model, loaded, limit=limit, log_samples=False)
        scores: dict[str, dict[str, Any]] = {}
        for harness_name, measured in results["results"].items():
            score: dict[str, Any] = {
                metric.removesuffix(",none"): _plain(value)
                for metric, value in measured.items()
                if "," in metric and not ("_stderr," in metric and _plain(value) in (None, "N/A"))
            }
            score["num_fewshot"] = results["n-shot"].get(harness_name)
            score["num_questions"] = results["n-samples"].get(harness_name, {}).get("effective")
            scores[harness_name.removeprefix(PREFIX)] = score
        return scores

    def load(self, limit: int | None = None) -> dict[str, Any]:
        """Return the harness's groups, and its `tasks` by name, including members of groups.

        Refuse labels that name no choice among the first `limit` questions of each task. Default: of all.
        """
        loaded: dict[str, Any] = self.manager.load(self.specs)
        for name, task in loaded["tasks"].items():
            check_labels(name.removeprefix(PREFIX), task, limit)
        return loaded


def _plain(value: Any) -> float | int | str | None:
    """Return a metric as JSON can hold it: a finite number, None or text."""
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    if isinstance(value, (int, float)):
        return value if math.isfinite(value) else None
    return str(value)


def _task_manager(names: set[str], include_path: str | Path | None) -> TaskManager:
    """Return a task manager with the names; the harness's tasks, slow to find, only if one is named."""
    paths = None if include_path is None else str(include_path)
    manager = TaskManager(include_path=paths, include_defaults=False)
    if names <= set(manager.all_tasks):
        return manager
    return _own_tasks() if paths is None else TaskManager(include_path=paths)


@functools.cache
def _own_tasks() -> TaskManager:
    return TaskManager()


def question_of(task: Any, doc: dict[str, Any]) -> str:
    """Return a document's question, without worked examples. It decides which blocks are fetched."""
    text = task.doc_to_text(doc)
    if isinstance(text, str):
        return text
    columns = zip(*map(str, task.doc_to_choice(doc)), strict=False)  # ends with the shortest choice
    shared = "".join(column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
    target = task.doc_to_target(doc)
    return " ".join(part.strip() for part in (shared, target) if isinstance(part, str) and part.strip())


def local_task_names() -> list[str]:
    """Return the short names of the local tasks, such as `boolq` for lm-eval's `midus_boolq`."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_local_task(name: str, data: str | Path) -> dict[str, Any]:
    """Return lm-eval's config of a task with questions in `data`, after a check of all of them."""
    data = Path(data).resolve()
    if not (data / f"{name}.jsonl").is_file():
        raise RequestError(
            f"{data} has no {name}.jsonl; expected a row of JSON per question: question, choices, gold "
            "(of atomic_numbers: name, number; of facts: question, answers)."
        )
    refuse_pointers("data", [data / f"{name}.jsonl"])
    config = yaml.safe_load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    # Before any model is loaded.
    if name == _FACTS:
        check_facts(data / f"{name}.jsonl")
    read_rows("data", str(data / f"{name}.jsonl"))
    if name != _FACTS:
        check_questions(data / f"{name}.jsonl", config)
    files = config["dataset_kwargs"]["data_files"]
    config["dataset_kwargs"]["data_files"] = {
        split: file.replace("${DATA}", str(data)) for split, file in files.items()
    }
    if name in _JUDGES:
        config["process_results"] = _JUDGES[name]
    return config


def _judge_fact(row: dict[str, Any], written: Sequence[str]) -> dict[str, float]:
    """Return whether the text up to the end of a clause is an answer; answers may be longer than a clause."""
    clauses = [written[0][: end.start()] for end in _CLAUSE_END.finditer(written[0])]
    is_right = any(has_answer(clause, answer, "whole") for clause in clauses for answer in row["answers"])
    return {"exact_match": float(is_right)}


def _judge_atomic_number(row: dict[str, Any], written: Sequence[str]) -> dict[str, float]:
    """Return whether the first whole number that is written is the right one."""
    found = next((number for number in read_numbers(written[0]) if number == number.to_integral_value()), None)
    return {"exact_match": float(found is not None and found in read_numbers(str(row["number"])))}


_JUDGES = {_FACTS: _judge_fact, "atomic_numbers": _judge_atomic_number}
