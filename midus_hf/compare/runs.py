"""One run of a comparison, a variant at one rate with one seed: its name, and the keys of its commands."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from midus_hf.compare.options import Comparison, Rate, rate_name
from midus_hf.compare.variants import Variant
from midus_hf.config.options import finite_number
from midus_hf.config.yaml_options import from_mapping
from midus_hf.training.arguments import TrainArguments
from midus_hf.training.optim.rates import Rates


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of a comparison: a variant at one rate, and a seed of new parameters and of the order of texts."""

    variant: Variant
    rate: Rate
    seed: int

    @property
    def name(self) -> str:
        """Name of the run, and its path within the folder of all runs: `VARIANT/RATE/seed-N`."""
        return f"{self.variant.name}/{rate_name(self.rate)}/seed-{self.seed}"

    @property
    def upscaled_name(self) -> str | None:
        """Name of the upscaled model, shared by runs that differ only in their training; None if the run trains the base."""
        if self.variant.upscale is None:
            return None
        return f"{self.variant.control_of or self.variant.name}-{_digest(dict(self.variant.upscale))}-seed-{self.seed}"

    def training_keys(self, comparison: Comparison, model: Path | str, output: Path) -> dict[str, Any]:
        """Return the keys of `midus train` for this run.

        Without `eval_steps` in the recipe, texts are measured `comparison.evaluations` times, or less often if the last step would
        not be measured otherwise.
        A checkpoint is saved at every measurement, and one is kept, unless the recipe says otherwise.
        """
        keys = {
            **self.variant.train,
            **self.rate,
            "model_name_or_path": str(model),
            "output_dir": str(output),
            "seed": self.seed,
        }
        if not comparison.texts:
            return keys
        if keys.get("eval_steps") is None:
            if keys.get("max_steps") is None:
                raise ValueError(
                    f"variants.{self.variant.name} has no max_steps, by which texts would be measured {comparison.evaluations} "
                    "times; set train.max_steps, or train.eval_steps, the steps between measurements."
                )
            # YAML reads 1e3 as text. `midus train` itself rejects a value that is no number.
            steps = finite_number(keys["max_steps"])
            keys["eval_steps"] = 1 if steps is None else _steps_between(int(steps), comparison.evaluations)
        keys.setdefault("save_steps", keys["eval_steps"])
        keys.setdefault("save_total_limit", 1)
        return {**keys, "eval_text": comparison.texts, "eval_on_start": True}

    def fine_tuning_keys(self, model: Path | str, output: Path) -> dict[str, Any]:
        """Return the keys of `midus sft` for this run, whose variant must be one that is fine-tuned."""
        assert self.variant.fine_tune is not None, "asked for"
        return {
            **self.variant.fine_tune,
            "model_name_or_path": str(model),
            "output_dir": str(output),
            "seed": self.seed,
        }

    def request(self, comparison: Comparison) -> dict[str, Any]:
        """Return everything that the result of the run depends on."""
        tuning = {} if self.variant.fine_tune is None else {"fine_tune": self.fine_tuning_keys("", Path())}
        return {
            **tuning,
            "base": comparison.base,
            "upscale": None if self.variant.upscale is None else dict(self.variant.upscale),
            "train": self.training_keys(comparison, "", Path()),
            "tasks": None if comparison.tasks is None else dataclasses.asdict(comparison.tasks),
        }


def _steps_between(steps: int, evaluations: int) -> int:
    """Return the fewest steps between measurements that divide `steps` and make at most `evaluations` of them."""
    return next(
        (every for every in range(max(1, -(-steps // evaluations)), steps) if steps % every == 0), max(1, steps)
    )


def runs_of(variant: Variant, comparison: Comparison) -> list[Run]:
    """Return the runs of a variant, seed by seed, with the seeds of the comparison."""
    return [Run(variant, rate, seed) for seed in comparison.seeds for rate in variant.rates]


def changed_keys(before: Any, now: Any, prefix: str = "") -> list[str]:
    """Return the dotted names of the keys that differ between two requests; `all` where the requests are no mappings."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [] if before == now else [prefix or "all"]
    missing = object()
    return [
        name
        for key in {**before, **now}
        for name in changed_keys(
            before.get(key, missing), now.get(key, missing), f"{prefix}.{key}" if prefix else str(key)
        )
    ]


def _digest(keys: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(keys, sort_keys=True, default=str).encode()).hexdigest()[:8]


# Keys of `midus train` that hold a learning rate: the numeric fields of `Rates`.
_RATES = [field.name for field in dataclasses.fields(Rates) if isinstance(field.default, float | None)]


def check(comparison: Comparison, variants: Sequence[Variant]) -> None:
    """Check that a comparison can be run: it has domain texts, all of its texts exist, and `check_runs` accepts its runs."""
    if not comparison.domain:
        raise ValueError("domain is empty; expected held-out text by which learning is measured, by name.")
    named: dict[Path, str] = {}
    for name, path in comparison.texts.items():
        before = named.setdefault(Path(path).resolve(), name)
        if before != name:
            raise ValueError(f"{path!r} is given twice, as {before!r} and as {name!r}; expected texts that differ.")
    for kind in ("domain", "retention"):
        for name, path in getattr(comparison, kind).items():
            if not Path(path).exists():
                raise ValueError(
                    f"{kind}.{name} is {path!r}, which does not exist; expected a file or a folder of text."
                )
    check_runs(comparison, variants)


def window_length(train: Mapping[str, Any]) -> int:
    """Return the tokens per window by which texts are measured: those per sequence of the run with these keys of `midus train`."""
    length = finite_number(train.get("sequence_length", TrainArguments.sequence_length))
    return TrainArguments.sequence_length if length is None else int(length)


def check_measurements(comparison: Comparison, variants: Sequence[Variant]) -> None:
    """Check that tasks and texts can be measured: tasks are known, and each text has a window of tokens of the base's tokenizer.

    Raises:
        ValueError: If a task is unknown, variants train on sequences of several lengths, the base's tokenizer cannot be loaded, or
            a text is too short for a window or has windows longer than the base was made for.
        ModuleNotFoundError: If there are tasks, and lm-eval, which is an extra, is not installed.
    """
    from midus_hf.evaluation.quiet import quiet_libraries

    if comparison.tasks is not None:
        from midus_hf.evaluation.harness import Tasks

        with quiet_libraries():
            Tasks(comparison.tasks.names, comparison.tasks.data, comparison.tasks.include_path)
    if not comparison.texts:
        return
    lengths = {variant.name: window_length(variant.train) for variant in variants}
    first = variants[0]
    for name, length in lengths.items():
        if length != lengths[first.name]:
            raise ValueError(
                f"variants.{name}.train.sequence_length is {length}, and that of {first.name} is {lengths[first.name]}; expected the "
                "same, since all variants are measured alike. Set train.sequence_length."
            )
    from transformers import AutoConfig

    from midus_hf.evaluation.perplexity import prepare_text
    from midus_hf.saved_models import load_tokenizer, refusing
    from midus_hf.topics.documents import has_column, read_documents

    trust = comparison.trust_remote_code
    with refusing(f"base is {comparison.base!r}, whose tokenizer cannot be loaded", OSError, ValueError):
        config = AutoConfig.from_pretrained(comparison.base, trust_remote_code=trust)
        tokenizer = load_tokenizer(comparison.base, trust)
    column, path_column = first.train.get("text_column") or "text", first.train.get("path_column")
    for kind in ("domain", "retention"):
        for name, path in getattr(comparison, kind).items():
            documents = read_documents(path, column)
            apart = path_column is not None and has_column(path, path_column)
            try:
                prepare_text(tokenizer, documents, config, sequence_length=lengths[first.name], apart=apart)
            except ValueError as error:
                raise ValueError(f"{kind}.{name} is {path!r}, which cannot be measured: {error}") from error


def check_runs(comparison: Comparison, variants: Sequence[Variant]) -> None:
    """Check that `midus train`, and `midus sft` after it, accept the keys of every run."""
    assert isinstance(comparison.train, Mapping), "files have been read"
    output = Path(comparison.output_dir)
    if output.exists() and not output.is_dir():
        raise ValueError(f"output_dir is {comparison.output_dir!r}, a file; expected a folder.")
    for variant in variants:
        for key in {key for rate in variant.rates for key in rate}:
            if key not in _RATES:
                raise ValueError(f"variants.{variant.name} has a rate {key!r}; expected one of: {', '.join(_RATES)}.")
        for run in runs_of(variant, comparison):
            keys = run.training_keys(comparison, model="model", output=Path("trained"))
            _check_keys(variant, "midus train", TrainArguments, keys)
            if variant.fine_tune is not None:
                from midus_hf.training.sft.arguments import SftArguments  # needs trl, which is an extra

                _check_keys(variant, "midus sft", SftArguments, run.fine_tuning_keys("model", Path("tuned")))


def _check_keys(variant: Variant, command: str, options: type[Any], keys: Mapping[str, Any]) -> None:
    try:
        from_mapping(options, keys)
    except ValueError as error:
        raise ValueError(f"variants.{variant.name}, as a run of {command}: {error}") from error
