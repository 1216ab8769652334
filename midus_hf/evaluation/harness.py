"""lm-evaluation-harness on models of this package, whose questions may fetch blocks."""

import functools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.api.task import ConfigurableTask
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from midus_hf.config.errors import RequestError
from midus_hf.data.corpus import read_rows
from midus_hf.evaluation.fetching import PathFinder, by_path, question_of
from midus_hf.evaluation.local_tasks import PREFIX, load_local_task, local_task_names
from midus_hf.sources.progress import only_bars
from midus_hf.sources.tokenizers import check_ids


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
        self._find_paths, self._questions = find_paths, questions

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
        if self._find_paths is None:
            return run(requests, *args, **kwargs)
        texts = [text_of(request) for request in requests]
        return by_path(requests, texts, self._find_paths, self.model, lambda some: run(some, *args, **kwargs))

    def _model_call(self, inps: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        check_ids(int(inps.max()), self.model.config.get_text_config().vocab_size)
        return super()._model_call(inps, *args, **kwargs)

    def _model_generate(self, context: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        check_ids(int(context.max()), self.model.config.get_text_config().vocab_size)
        return super()._model_generate(context, *args, **kwargs)


class _LocalTask(ConfigurableTask):
    """A local task. Its rows are read like those of a corpus, since the reader of `datasets` turns answers into dates."""

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
        with only_bars():
            loaded = self.load()
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
        with only_bars():
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
            score["dataset"] = _dataset_of(loaded["tasks"].get(harness_name))
            scores[harness_name.removeprefix(PREFIX)] = score
        return scores

    def load(self) -> dict[str, Any]:
        """Return the harness's groups, and its `tasks` by their names in the harness, including members of groups."""
        return self.manager.load(self.specs)


def _dataset_of(task: Any) -> dict[str, str | None]:
    """Return the id, configuration and split of the dataset on the Hub that a task reads; None of a group or of local files."""
    if task is None or "data_files" in (task.get_config("dataset_kwargs") or {}):
        return {"id": None, "config": None, "split": None}
    split = task.get_config("test_split") or task.get_config("validation_split")
    return {"id": task.get_config("dataset_path"), "config": task.get_config("dataset_name"), "split": split}


def _plain(value: Any) -> float | int | str | None:
    """Return a metric as JSON can hold it: a finite number, None or text. Tasks of other packages may return any type."""
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    if isinstance(value, (int, float)):
        return value if math.isfinite(value) else None
    return str(value)


def _task_manager(names: set[str], include_path: str | Path | None) -> TaskManager:
    """Return a task manager with the names, without the harness's tasks if no name needs them, since finding them takes long."""
    paths = None if include_path is None else str(include_path)
    manager = TaskManager(include_path=paths, include_defaults=False)
    if names <= set(manager.all_tasks):
        return manager
    return _own_tasks() if paths is None else TaskManager(include_path=paths)


@functools.cache
def _own_tasks() -> TaskManager:
    return TaskManager()
