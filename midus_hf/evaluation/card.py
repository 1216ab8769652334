"""Results of an evaluation in the metadata of a model's card (`model-index`), as the Hub reads them."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from yaml import YAMLError

from midus_hf.config.errors import RequestError, first_line
from midus_hf.evaluation.report import ABOUT_THE_TASK
from midus_hf.files.checkpoint_files import CARD_FILE
from midus_hf.files.outputs import atomic_write

_TASK: dict[str, Any] = {"task_type": "text-generation", "task_name": "Text Generation"}
# Metrics of lm-eval that have another name on the Hub.
_TYPES = {"acc": "accuracy"}


def check_cards(models: Sequence[str]) -> None:
    """Raise `RequestError` if a model is not a writable folder, or if its card cannot be read."""
    for name in models:
        if not Path(name).is_dir() or not os.access(name, os.W_OK):
            raise RequestError(
                f"model is {name!r}; --write-card expects a folder here that can be written to. Download the model (hf download), or "
                "leave --write-card out."
            )
        _read(Path(name))


def write_results(report: dict[str, Any]) -> list[str]:
    """Write the results of `evaluate` for each folder into its card; a new value of the same measure replaces the old one.

    Returns:
        A line about each card that was written, and about each result that was not.
    """
    lines = []
    for measured in report["models"]:
        folder = Path(measured["model"])
        results, left_out = _results(measured, report["settings"])
        if results:
            card, new = _read(folder), {_measure(result) for result in results}
            data: Any = card.data
            earlier = [result for result in data.eval_results or [] if _measure(result) not in new]
            data.eval_results = earlier + results
            data.model_name = data.model_name or Path(os.path.realpath(folder)).name
            with atomic_write(folder / CARD_FILE) as unfinished:
                card.save(unfinished)
            lines.append(f"{folder / CARD_FILE}: results in its metadata: {len(results)} new, {len(earlier)} earlier")
        lines += [f"{folder / CARD_FILE}: {reason}" for reason in left_out]
    return lines


def _read(folder: Path) -> ModelCard:
    """Return the card in a folder, or an empty one; the Hub's class reads a card's text by the encoding of the machine."""
    path = folder / CARD_FILE
    try:
        text = path.read_bytes().decode() if path.exists() else f"# {Path(os.path.realpath(folder)).name}\n"
        return ModelCard(text if REGEX_YAML_BLOCK.match(text) else f"---\n{{}}\n---\n{text}")
    except (OSError, ValueError, TypeError, AttributeError, YAMLError) as error:
        raise RequestError(
            f"{path} is not a model card that can be read ({first_line(error)}); repair its metadata."
        ) from None


def _measure(result: EvalResult) -> str:
    """Return what was measured and how, without the value; results on one dataset share its name in the metadata."""
    return repr(dataclasses.replace(result, metric_value=None, dataset_name="", verify_token=None))


def _results(measured: dict[str, Any], settings: dict[str, Any]) -> tuple[list[EvalResult], list[str]]:
    """Return the results of a model, and the reasons for leaving out others."""
    results, left_out = [], []

    def add(name: str, dataset: dict[str, Any], metric: str, value: float, **how: Any) -> None:
        kind = metric.partition(",")[0]
        args = {"dtype": settings["dtype"], "reads_blocks": measured["reads_blocks"], **how}
        results.append(
            EvalResult(
                **_TASK,
                dataset_name=name,
                dataset_type=dataset["id"] or name,
                dataset_config=dataset["config"],
                dataset_split=dataset["split"],
                metric_type=_TYPES.get(kind, kind),
                metric_name=metric,
                metric_value=value,
                metric_args={key: value for key, value in args.items() if value not in (None, "auto")},
            )
        )

    perplexity = measured["perplexity"]
    if perplexity is not None and measured["causal"]:
        how: dict[str, Any] = {name: perplexity[name] for name in ("sequence_length", "tokens", "tokens_sha256")}
        add(Path(settings["text"]).name, perplexity["dataset"], "perplexity", perplexity["perplexity"], **how)
    elif perplexity is not None:
        left_out.append("no perplexity, since it cannot be compared: the model reads tokens before it predicts them")
    for task, scores in measured["tasks"].items():
        how = {"task": task, "num_few_shot": scores["num_fewshot"] or 0, "limit": settings["limit"]}
        for metric, value in scores.items():
            if metric in ABOUT_THE_TASK or metric.partition(",")[0].endswith("_stderr"):
                continue
            if isinstance(value, (int, float)):
                add(task, scores["dataset"], metric, value, **how)
            else:
                left_out.append(f"no {metric} of {task}, which is {value or 'not finite'}")
    return results, left_out
