"""lm-evaluation-harness on models of this package. Importing it registers the model type `midus` with the harness."""

import difflib
import functools
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import midus_hf  # noqa: F401  (registers the classes that `MidusLM` loads)
from midus_hf.evaluation.local_tasks import PREFIX, load_local_task, local_task_names


@register_model("midus")
class MidusLM(HFLM):
    """The harness's `hf` for models of this package, which load without `trust_remote_code`.

    Args:
        pretrained: A folder, a hub id, or a model.
        **kwargs: As for `hf`.
    """

    def __init__(self, pretrained: str | PreTrainedModel, **kwargs: Any):
        super().__init__(pretrained, **{"backend": "causal", **kwargs})


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
    ) -> dict[str, dict[str, Any]]:
        """Score a model.

        Args:
            model: In eval mode, on its device.
            tokenizer: Its tokenizer.
            num_fewshot: Worked examples before a question. Default: what the task says, else 0.
            limit: Questions a task, the first ones. Default: all.
            batch_size: Requests a forward pass.
            max_length: Longest input in tokens. Default: what the model was made for.
            seed: Of the choice of examples and the bootstrap.

        Returns:
            By the name asked for (a group also brings its members), the metrics as the harness names them (`acc`,
            `acc_stderr`, `acc_norm`), `num_fewshot` and `num_questions`.
        """
        results = simple_evaluate(
            model=MidusLM(model, tokenizer=tokenizer, batch_size=batch_size, max_length=max_length),
            tasks=self.specs,
            task_manager=self.manager,
            num_fewshot=num_fewshot,
            limit=limit,
            log_samples=False,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
        asked_for = {harness_name: name for name, harness_name in self.names.items()}
        scores: dict[str, dict[str, Any]] = {}
        for harness_name, measured in results["results"].items():
            score = {
                metric.removesuffix(",none"): value
                for metric, value in measured.items()
                if isinstance(value, (int, float)) and metric != "sample_len"
            }
            score["num_fewshot"] = results["n-shot"].get(harness_name)
            score["num_questions"] = results["n-samples"].get(harness_name, {}).get("effective")
            scores[asked_for.get(harness_name, harness_name)] = score
        return scores


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
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    where = f"{', '.join(local)} or a task of lm-eval" if local else "a task of lm-eval"
    return f"task is {name!r}; expected {where}.{hint}"
