"""lm-evaluation-harness on models of this package. Importing it registers the model type `midus` with the harness."""

import contextlib
import difflib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lm_eval import evaluator, simple_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager, get_task_dict
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import midus_hf  # noqa: F401  (registers the classes that `MidusLM` loads)
from midus_hf.evaluation.beside_documents import DocumentFinder, behind_documents
from midus_hf.evaluation.fetching import PathFinder, by_path, fetches_blocks, question_of
from midus_hf.evaluation.local_tasks import PREFIX, load_local_task, local_task_names
from midus_hf.evaluation.quiet import without_bars
from midus_hf.retrieval.bank_tree import check_tree
from midus_hf.retrieval.cluster_tree import ClusterTree
from midus_hf.retrieval.memory_retriever import MemoryRetriever
from midus_hf.saved_models import check_ids


@register_model("midus")
class MidusLM(HFLM):
    """The harness's `hf` for models of this package, which load without `trust_remote_code`.

    Args:
        pretrained: A folder, a hub id, or a model.
        progress: Called with the rows of each forward pass, or of what is generated. Default: nothing is.
        retriever: A tree of topics, as `midus cluster build` makes it, or what finds paths: blocks are fetched by the path of
            what is asked. Default: none, and nothing is fetched by a path.
        questions: What a request asks, by which its path and its document are found. Default: its context.
        find_documents: Finds a document for each question, which its context then begins with. Default: contexts are as they are.
        **kwargs: As for `hf`.

    Raises:
        ValueError: If there is a retriever, and the model fetches no blocks, or by a tree of another shape.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        progress: Callable[[int], Any] | None = None,
        retriever: str | PathFinder | None = None,
        questions: Callable[[Any], str] | None = None,
        find_documents: DocumentFinder | None = None,
        **kwargs: Any,
    ):
        self._progress = progress or (lambda rows: None)
        super().__init__(pretrained, **{"backend": "causal", **kwargs})
        tree: ClusterTree | None = None
        if isinstance(retriever, str):
            found = MemoryRetriever.load(retriever)
            tree, retriever = found.tree, found.paths
        self._find_paths, self._find_documents = retriever, find_documents
        self._questions = questions or (lambda request: request.args[0])
        if self._find_paths is not None and not fetches_blocks(self.model):
            raise ValueError(
                f"retriever is given, but this {self.model.config.model_type} model fetches no blocks; leave it out."
            )
        if tree is not None:
            check_tree(tree, self.model)

    def loglikelihood(self, requests: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """As the harness's, with the document and the blocks of what each request asks."""
        run = super().loglikelihood
        return self._asked(requests, lambda some: run(some, *args, **kwargs))

    def loglikelihood_rolling(self, requests: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """As the harness's, with the blocks of each whole text."""
        run = super().loglikelihood_rolling
        texts = [request.args[0] for request in requests]
        return self._with_blocks(requests, texts, lambda some: run(some, *args, **kwargs))

    def generate_until(self, requests: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """As the harness's, with the document and the blocks of what each request asks."""
        run = super().generate_until
        return self._asked(requests, lambda some: run(some, *args, **kwargs))

    def _asked(self, requests: list[Any], run: Callable[[list[Any]], list[Any]]) -> list[Any]:
        if self._find_paths is None and self._find_documents is None:
            return run(requests)
        questions = [self._questions(request) for request in requests]
        if self._find_documents is not None:
            requests = behind_documents(requests, questions, self._find_documents)
        return self._with_blocks(requests, questions, run)

    def _with_blocks(self, requests: list[Any], texts: list[str], run: Callable[[list[Any]], list[Any]]) -> list[Any]:
        if self._find_paths is None:
            return run(requests)
        return by_path(requests, texts, self._find_paths, self.model, run)

    def _model_call(self, inps: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._progress(len(inps))
        self._check_ids(inps)
        return super()._model_call(inps, *args, **kwargs)

    def _model_generate(self, context: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._progress(len(context))
        self._check_ids(context)
        return super()._model_generate(context, *args, **kwargs)

    def _check_ids(self, ids: torch.Tensor) -> None:
        check_ids(int(ids.max()), self.model.config.get_text_config().vocab_size)


class Tasks:
    """Tasks to run, found by name before any model is loaded.

    Args:
        names: With `data`, a local task goes by its short name or with the prefix `midus_`. Every other name, and
            every name without `data`, is looked up in `include_path` and then among the harness's own tasks, whose
            questions come from the hub.
        data: Folder with the questions of the local tasks.
        include_path: Folder with task files of the caller.

    Raises:
        ValueError: If a name is unknown (near matches are named), repeated, or its questions are missing.
    """

    def __init__(self, names: list[str], data: str | Path | None = None, include_path: str | Path | None = None):
        if include_path is not None and not Path(include_path).is_dir():
            raise ValueError(f"include_path is {str(include_path)!r}; expected a folder of task files.")
        local = local_task_names() if data is not None else []
        others = [name for name in names if name.removeprefix(PREFIX) not in local]
        self.manager = _task_manager(others, include_path)
        self.names: dict[str, str] = {}
        """The name in the harness of every task, by the name it was asked for."""
        self.specs: list[str | dict[str, Any]] = []
        for name in names:
            short = name.removeprefix(PREFIX)
            spec: str | dict[str, Any]
            if data is not None and short in local:
                harness_name, spec = PREFIX + short, load_local_task(short, data)
            elif name in self.manager.all_tasks:
                harness_name = spec = name
            else:
                raise ValueError(_unknown_task(name, self.manager.all_tasks, local))
            if harness_name in self.names.values():
                raise ValueError(f"task {name!r} is given twice; expected every task once.")
            self.names[name] = harness_name
            self.specs.append(spec)

    def run(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        num_fewshot: int | None = None,
        limit: int | None = None,
        batch_size: int = 4,
        max_length: int | None = None,
        seed: int = 0,
        progress: Callable[[int], Any] | None = None,
        quiet: bool = False,
        find_paths: PathFinder | None = None,
        find_documents: DocumentFinder | None = None,
        tell_answer: Callable[[dict[str, Any]], Any] | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Score a model.

        Args:
            model: In eval mode, on its device.
            tokenizer: Its tokenizer.
            num_fewshot: Worked examples before a question. Default: what the task says, else 0.
            limit: Questions per task, the first ones. Default: all.
            batch_size: Requests per forward pass.
            max_length: Longest input in tokens. Default: what the model was made for.
            seed: Of the choice of examples and the bootstrap.
            progress: As in `MidusLM`.
            quiet: Whether to hide the harness's own progress bars. Default: false.
            find_paths: By which questions fetch blocks; it sees them without worked examples. Default: nothing is fetched.
            find_documents: Finds a document for each question, seen likewise, which then stands in front of it and of its worked
                examples, with an empty line between. What is too long for the model is cut at its beginning. Default: nothing is.
            tell_answer: Called with each question, once for each filter of its task: `{"task", "filter", "question", "target",
                "answer", "scores"}`, where `question` is the row of the task, `answer` what the filter left of each of its
                requests (a pair of log-likelihood and whether it is the likeliest, or what was written), and `scores` every
                metric; with `find_documents` also `"document"`. Default: nothing is.

        Returns:
            By the name asked for (a group also brings its members), every metric of the task as the harness names it
            (`acc`, `acc_stderr`, `acc_norm`), `num_fewshot` and `num_questions`. A metric is None where it came out as
            no finite number, and text where it is no number at all; a standard error that is not known is left out.
        """
        question_in = self._questions()
        with without_bars() if quiet else contextlib.nullcontext(), _without_environment_report():
            results = simple_evaluate(
                model=MidusLM(
                    model,
                    progress=progress,
                    retriever=find_paths,
                    questions=lambda request: question_in(request.task_name, request.doc),
                    find_documents=find_documents,
                    tokenizer=tokenizer,
                    batch_size=batch_size,
                    max_length=max_length,
                ),
                tasks=self.specs,
                task_manager=self.manager,
                num_fewshot=num_fewshot,
                limit=limit,
                log_samples=tell_answer is not None,
                random_seed=seed,
                numpy_random_seed=seed,
                torch_random_seed=seed,
                fewshot_random_seed=seed,
            )
        asked_for = {harness_name: name for name, harness_name in self.names.items()}
        scores: dict[str, dict[str, Any]] = {}
        for harness_name, measured in results["results"].items():
            score = {
                metric.removesuffix(",none"): _plain(value)
                for metric, value in measured.items()
                if "," in metric and not (_is_standard_error(metric) and _plain(value) in (None, "N/A"))
            }
            score["num_fewshot"] = results["n-shot"].get(harness_name)
            score["num_questions"] = results["n-samples"].get(harness_name, {}).get("effective")
            scores[asked_for.get(harness_name, harness_name)] = score
        if tell_answer is not None:
            for harness_name, samples in results["samples"].items():
                for sample in samples:
                    answer = {"task": asked_for.get(harness_name, harness_name), **_answer(sample)}
                    if find_documents is not None:
                        (answer["document"],) = find_documents([question_in(harness_name, sample["doc"])])
                    tell_answer(answer)
        return scores

    def built(self) -> dict[str, Any]:
        """The harness's own tasks, members of groups included, by their names there."""
        return dict(_flat(get_task_dict(self.specs, self.manager)))

    def _questions(self) -> Callable[[str, dict[str, Any]], str]:
        """What a task, by its name in the harness, asks of a document, without worked examples."""
        built = functools.cache(self.built)
        return lambda name, doc: question_of(built()[name], doc)


@contextlib.contextmanager
def _without_environment_report() -> Iterator[None]:
    """Keep the harness from looking at where it runs, which nobody reads.

    It lists installed packages, compilers and drivers, which takes seconds, and asks git for the commit of the current folder, which
    says `fatal: not a git repository` where there is none.
    """
    with contextlib.ExitStack() as stack:
        for name in ("add_env_info", "get_git_commit_hash"):
            stack.enter_context(patch.object(evaluator, name, lambda *results: None, create=True))
        yield


def _flat(tasks: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """The tasks of groups, and of groups within them, by their names."""
    for name, task in tasks.items():
        if isinstance(task, Mapping):
            yield from _flat(task)
        else:
            yield str(name), task


def _answer(sample: dict[str, Any]) -> dict[str, Any]:
    """What `tell_answer` is told of a sample of the harness."""
    return {
        "filter": sample["filter"],
        "question": sample["doc"],
        "target": sample["target"],
        "answer": sample["filtered_resps"],
        "scores": {metric: sample[metric] for metric in sample["metrics"]},
    }


def _is_standard_error(metric: str) -> bool:
    """Whether a name such as `acc_stderr` or `acc_stderr,strict` is that of a standard error."""
    return metric.partition(",")[0].endswith("_stderr")


def _plain(value: Any) -> float | int | str | None:
    """What JSON can hold of a metric, which a task of the caller's may give as anything."""
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    if isinstance(value, (int, float)):
        return value if math.isfinite(value) else None
    return str(value)


def _task_manager(names: list[str], include_path: str | Path | None) -> TaskManager:
    """The manager of the least tasks that has all the names, if there is one: finding the harness's own takes long."""
    paths = None if include_path is None else str(include_path)
    manager = TaskManager(include_path=paths, include_defaults=False)
    missing = set(names) - set(manager.all_tasks)
    if not missing or all(name.startswith(PREFIX) for name in missing):
        return manager
    return _own_tasks() if paths is None else TaskManager(include_path=paths)


@functools.cache
def _own_tasks() -> TaskManager:
    return TaskManager()


def _unknown_task(name: str, known: list[str], local: list[str]) -> str:
    if not local and name.removeprefix(PREFIX) in local_task_names():
        return f"task is {name!r}, whose questions are local; give the folder that holds them as data."
    near = difflib.get_close_matches(name, {*local, *known}, n=3)
    hint = (
        f"Did you mean {' or '.join(map(repr, near))}?"
        if near
        else "Give the folder of a task of your own as include_path."
    )
    where = f"{', '.join(local)} or a task of lm-eval" if local else "a task of lm-eval"
    return f"task is {name!r}; expected {where}. {hint}"
