"""One run of a comparison, a variant at one rate with one seed: its name, its keys, and what is checked before it begins."""

import dataclasses
import filecmp
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from midus_hf.compare.options import Comparison, Rate, rate_name, split_function
from midus_hf.compare.variants import BASE, Variant, with_corpora
from midus_hf.config.options import finite_number
from midus_hf.config.yaml_options import from_mapping
from midus_hf.files.secrets import for_record
from midus_hf.model_names import check_model_name
from midus_hf.training.arguments import TrainArguments
from midus_hf.training.optim.rates import Rates

# Every step trains on as many sequences: the smaller batch at the end of a corpus is left out.
_WHOLE_BATCHES = {"dataloader_drop_last": True}


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of a comparison: a variant at one rate, and a seed of new parameters and of the order of texts."""

    variant: Variant
    rate: Rate = dataclasses.field(default_factory=dict)
    seed: int = 0

    @property
    def name(self) -> str:
        """Name of the run: `VARIANT/RATE/seed-N`, or `base` for the base, which is measured and not trained."""
        name = self.variant.name
        return name if self.variant.is_base else f"{name}/{rate_name(self.rate)}/seed-{self.seed}"

    def folder(self, comparison: Comparison) -> Path:
        """Return the folder of the run's models; its result and its log are beside it, as `FOLDER.json` and `FOLDER.log`."""
        return Path(comparison.output_dir) / "runs" / self.name

    def training_keys(self, comparison: Comparison, model: Path | str, output: Path) -> dict[str, Any]:
        """Return the keys of `midus train` for this run.

        Texts are measured at the start and at the end, or every `eval_steps` of the recipe.
        """
        keys = {
            **_WHOLE_BATCHES,
            **self.variant.train,
            **self.rate,
            "model_name_or_path": str(model),
            "output_dir": str(output),
            "seed": self.seed,
        }
        if not comparison.texts:
            return keys
        # YAML reads 1e3 as text. `midus train` itself rejects a value that is no number.
        steps = finite_number(keys.get("max_steps"))
        if keys.get("max_steps") is None or (steps is not None and steps < 1):
            raise ValueError(
                f"variants.{self.variant.name} has max_steps {keys.get('max_steps')}; expected at least 1, the budget that variants "
                "are compared at. Set train.max_steps."
            )
        if keys.get("eval_steps") is None:
            keys["eval_steps"] = 1 if steps is None else int(steps)
        return {**keys, "eval_text": comparison.texts, "eval_on_start": True}

    def stage_keys(self, comparison: Comparison, stage: int, model: Path | str, output: Path) -> dict[str, Any]:
        """Return the keys of `midus train` for one stage of this run, numbered from 0, with the stage's corpus."""
        corpora = [one.corpus for one in comparison.stages.values()]
        keys = with_corpora({**_WHOLE_BATCHES, **self.variant.train, **self.rate}, corpora[stage], corpora[:stage])
        own = {
            "corpus": corpora[stage],
            "model_name_or_path": str(model),
            "output_dir": str(output),
            "seed": self.seed,
        }
        return {**keys, **own}

    def fine_tuning_keys(self, model: Path | str, output: Path) -> dict[str, Any]:
        """Return the keys of `midus sft` for this run, whose variant must be one that is fine-tuned."""
        assert self.variant.fine_tune is not None
        own = {"model_name_or_path": str(model), "output_dir": str(output), "seed": self.seed}
        return {**self.variant.fine_tune, **own}

    def request(self, comparison: Comparison) -> dict[str, Any]:
        """Return everything that the result of the run depends on, as JSON holds it and `for_record` shows it."""
        tuned, function = self.variant.fine_tune is not None, self.variant.function
        if self.variant.is_base:
            train = None
        elif comparison.stages:
            own = {name: getattr(self.variant, name) for name in ("replay", "one_per_stage", "upscale_each")}
            train = {**self.variant.train, **self.rate, "seed": self.seed, **own}
        else:
            train = self.training_keys(comparison, "", Path())
        values = {
            "base": comparison.base,
            "upscale": self.variant.upscale,
            "function": None if function is None else _function_record(function),
            "train": train,
            "stages": {name: stage.corpus for name, stage in comparison.stages.items()},
            "embedding_model": comparison.embedding_model if self.variant.one_per_stage else None,
            "fine_tune": self.fine_tuning_keys("", Path()) if tuned else None,
            "texts": comparison.texts,
            "windows": window_keys(self.variant.train),
            "tasks": None if comparison.tasks is None else dataclasses.asdict(comparison.tasks),
        }
        return for_record(json.loads(json.dumps(values)))


def base_run(comparison: Comparison) -> Run:
    """Return the run that measures the base, as all variants read their texts."""
    assert isinstance(comparison.train, Mapping), "files have been read"
    return Run(Variant(BASE, None, comparison.train, []))


def _function_record(function: str) -> dict[str, str]:
    """Return the name of a function and the SHA-256 of its file, by which a changed function is noticed."""
    file, name = split_function(function)
    return {"name": name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}


def searches_of(variant: Variant, comparison: Comparison) -> list[Run]:
    """Return the runs that choose the rate of a variant: one at each of its rates, with the first seed."""
    return [Run(variant, rate, comparison.seeds[0]) for rate in variant.rates]


def runs_at(rate: Rate, variant: Variant, comparison: Comparison) -> list[Run]:
    """Return the runs of a variant at one rate, one per seed of the comparison."""
    return [Run(variant, rate, seed) for seed in comparison.seeds]


def tokens_of(variant: Variant, num_stages: int = 1) -> int | None:
    """Return how many tokens a run of a variant trains on in all stages; None where its keys give no number of steps."""
    keys = {"max_steps": -1, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 8, **variant.train}
    sizes = [finite_number(keys[name]) for name in keys if name in _SIZES]
    sizes.append(window_keys(variant.train)["sequence_length"])
    if None in sizes or min(size for size in sizes if size is not None) < 0:
        return None
    return int(math.prod(size for size in sizes if size is not None)) * num_stages


def corpora_of(variant: Variant, comparison: Comparison) -> list[str]:
    """Return the corpora that a variant trains on: paths, or ids on the Hub."""
    if comparison.stages:
        return [stage.corpus for stage in comparison.stages.values()]
    corpus = variant.train.get("corpus") or []
    return [corpus] if isinstance(corpus, str) else list(corpus)


def window_keys(train: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a run with these keys of `midus train` reads texts: tokens per window, and the columns of text and path."""
    length = finite_number(train.get("sequence_length", TrainArguments.sequence_length))
    return {
        "sequence_length": TrainArguments.sequence_length if length is None else int(length),
        "column": train.get("text_column") or "text",
        "path_column": train.get("path_column"),
    }


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


# Keys of `midus train` whose product is a run's number of sequences.
_SIZES = ("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps")

# Keys of `midus train` that hold a learning rate: the numeric fields of `Rates`.
_RATES = [field.name for field in dataclasses.fields(Rates) if isinstance(field.default, float | None)]


def check(comparison: Comparison, variants: Sequence[Variant]) -> None:
    """Check what a run would refuse too late: keys of runs, corpora, texts, tasks, and the base's tokenizer and positions.

    Nothing is written but the texts as tokens, to the cache of `datasets`.

    Raises:
        ValueError: If a command would refuse keys or a corpus, a text is missing, named twice, trained on or shorter than a sequence,
            variants have sequences of several lengths, a task is unknown, or the base has no tokenizer or too few positions.
        ModuleNotFoundError: If there are tasks, and lm-eval, which is an extra, is not installed.
    """
    output = Path(comparison.output_dir)
    if output.exists() and not output.is_dir():
        raise ValueError(f"output_dir is {comparison.output_dir!r}, a file; expected a folder.")
    _check_texts(comparison, variants)
    if comparison.embedding_model is not None:
        check_model_name("embedding_model", comparison.embedding_model)
    for variant in variants:
        _check_keys(variant, comparison)
    _check_corpora(comparison, variants)
    if comparison.tasks is not None:
        from midus_hf.evaluation.harness import Tasks
        from midus_hf.evaluation.quiet import quiet_libraries

        with quiet_libraries():
            Tasks(comparison.tasks.names, comparison.tasks.data)
    _check_base(comparison)


def _check_texts(comparison: Comparison, variants: Sequence[Variant]) -> None:
    """Check that all measured texts exist and differ, and that none of them is trained on."""
    texts: dict[str, Path] = {}
    for name, path in comparison.texts.items():
        label, text = comparison.label(name), Path(path).expanduser()
        if not text.exists():
            raise ValueError(f"{label} is {path!r}, which does not exist; expected a file or a folder of text.")
        for other, before in texts.items():
            if _overlap(text, before):
                raise ValueError(
                    f"{label} is {path!r}, which shares text with {other}, {str(before)!r}; expected texts that differ."
                )
        texts[label] = text
    for variant in variants:
        for corpus in corpora_of(variant, comparison):
            for label, text in texts.items():
                if Path(corpus).expanduser().exists() and _overlap(text, Path(corpus).expanduser()):
                    raise ValueError(
                        f"{label} is {str(text)!r}, which {variant.name} trains on, since its corpus is {corpus!r}; expected text "
                        "that no variant trains on."
                    )


def _overlap(first: Path, second: Path) -> bool:
    """Return whether one of two paths lies in the other, or both are files with the same content."""
    one, other = first.resolve(), second.resolve()
    if one.is_relative_to(other) or other.is_relative_to(one):
        return True
    return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)


def _check_corpora(comparison: Comparison, variants: Sequence[Variant]) -> None:
    """Check that `midus train` can read the corpora of all variants that lie here; what a function reads is its own.

    A dataset of the Hub would be downloaded whole.
    """
    from midus_hf.topics.corpus import may_be_dataset_id, read_corpus

    assert isinstance(comparison.train, Mapping), "files have been read"
    read: set[str] = set()
    for variant in variants:
        train = variant.train
        is_own = train.get("corpus") != comparison.train.get("corpus")
        corpora: dict[str, Any] = {
            f"variants.{variant.name}.train.corpus" if is_own else "train.corpus": train.get("corpus")
        }
        if comparison.stages:
            corpora = {f"stages.{name}.corpus": stage.corpus for name, stage in comparison.stages.items()}
        named: dict[str, Any] = {"split": train.get("corpus_split"), "name": train.get("corpus_name")}
        named["text_column"] = train.get("text_column") or "text"
        for key, corpus in corpora.items():
            source = json.dumps([corpus, named])
            names = [corpus] if isinstance(corpus, str) else list(corpus or ())
            may_be_ids = all(may_be_dataset_id(name) and not Path(name).expanduser().exists() for name in names)
            if variant.function is None and source not in read and not (names and may_be_ids):
                read_corpus(corpus, key=key, **named)
                read.add(source)


def _check_keys(variant: Variant, comparison: Comparison) -> None:
    """Check that `midus train`, and `midus sft` after it, accept the keys of every run of a variant."""
    for key in {key for rate in variant.rates for key in rate}:
        if key not in _RATES:
            raise ValueError(f"variants.{variant.name} has a rate {key!r}; expected one of: {', '.join(_RATES)}.")
    if comparison.stages and (variant.train.get("path_column") is not None or tokens_of(variant) is None):
        raise ValueError(
            f"variants.{variant.name} has path_column, or no max_steps; expected max_steps, by which the tokens of a stage are "
            "counted, and no path_column, since stages are measured without paths."
        )
    for run in searches_of(variant, comparison):
        trainings = [
            run.stage_keys(comparison, stage, "model", Path("trained")) for stage in range(len(comparison.stages))
        ]
        trainings = trainings or [run.training_keys(comparison, "model", Path("trained"))]
        commands: list[tuple[str, type[Any], dict[str, Any]]] = [
            ("midus train", TrainArguments, keys) for keys in trainings
        ]
        if variant.fine_tune is not None:
            from midus_hf.training.sft.arguments import SftArguments  # needs trl, which is an extra

            commands.append(("midus sft", SftArguments, run.fine_tuning_keys("model", Path("tuned"))))
        for command, options, keys in commands:
            try:
                from_mapping(options, keys)
            except ValueError as error:
                raise ValueError(f"variants.{variant.name}, as a run of {command}: {error}") from error
    assert isinstance(comparison.train, Mapping), "files have been read"
    length, shared = (window_keys(train)["sequence_length"] for train in (variant.train, comparison.train))
    if length != shared:
        raise ValueError(
            f"variants.{variant.name}.train.sequence_length is {length}, and that of train is {shared}; expected the same, since "
            "all texts are measured alike. Set train.sequence_length."
        )


def _check_base(comparison: Comparison) -> None:
    """Check that the base has a tokenizer and positions for a sequence, and that each text has a sequence of its tokens.

    With stages, documents of any length are measured.
    """
    from transformers import AutoConfig

    from midus_hf.library_bars import data_bars_on_terminals
    from midus_hf.saved_models import load_tokenizer, refusing
    from midus_hf.topics.corpus import read_corpus
    from midus_hf.training.data.packing import packed_sequences
    from midus_hf.training.run import check_sequence_length

    train = base_run(comparison).variant.train
    keys = window_keys(train)
    length, column = keys["sequence_length"], keys["column"]
    check_model_name("base", comparison.base)
    with refusing(f"base is {comparison.base!r}, whose config or tokenizer cannot be loaded", OSError, ValueError):
        config = AutoConfig.from_pretrained(comparison.base, trust_remote_code=False)
        tokenizer = load_tokenizer(comparison.base)
    check_sequence_length("train.sequence_length", length, config)
    options: dict[str, Any] = {
        "documents_apart": bool(train.get("document_mask")),
        "vocab_size": config.get_text_config().vocab_size,
    }
    for name, path in {} if comparison.stages else comparison.texts.items():
        label = comparison.label(name)
        with data_bars_on_terminals():
            rows = read_corpus(path, key=label, text_column=column)
            packed_sequences(rows, tokenizer, length, key=label, text_column=column, **options)
