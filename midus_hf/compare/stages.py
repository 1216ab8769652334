"""A run through stages: several corpora are learned one after the other, and all texts are measured after each.

All losses are measured document by document, so that they are the same however a document's model was chosen.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from midus_hf.compare.making import (
    TrainedModel,
    free_memory,
    made_together,
    result_of,
    taught_model,
    trained_model,
    upscaled_model,
)
from midus_hf.compare.options import Comparison
from midus_hf.compare.results import Point, Result, read_result
from midus_hf.compare.runs import Run, base_run, tokens_of, window_keys
from midus_hf.compare.variants import with_corpora
from midus_hf.files.checkpoint_files import CERTIFICATE

# Negative log-likelihood in nats, and number of predicted tokens, of each document of a text.
Losses = Sequence[tuple[float, int]]


def measure_stages(run: Run, comparison: Comparison, folder: Path) -> Result:
    """Do a run of a comparison with stages, and return its result; the curve has the start and a point after each stage."""
    if run.variant.is_base:
        losses = _losses_of_texts(comparison.base, list(comparison.texts), run, comparison)
        return Result(run.variant.name, {}, 0, [Point(0, _means(losses))])
    if run.variant.one_per_stage:
        return _one_per_stage(run, comparison, folder)
    return _in_order(run, comparison, folder)


def _in_order(run: Run, comparison: Comparison, folder: Path) -> Result:
    """Let one model learn the stages in order. Adapters are merged after each stage, and the next stage trains new ones."""
    variant, model = run.variant, comparison.base
    base = read_result(base_run(comparison).folder(comparison))
    assert base is not None, "the base is measured first"
    made: list[dict[str, Any]] = []
    start: Mapping[str, float] = base.losses
    if variant.upscale is not None and not variant.upscale_each:
        model = str(folder / "upscaled")
        made.append(upscaled_model(comparison.base, Path(model), run.seed, variant.upscale)[1])
        if not made[0]["starts_at_base"]:  # measured as the base was, so that what upscaling lost is known
            start = _means(_losses_of_texts(model, list(comparison.texts), run, comparison))
    points, learned = [Point(0, start)], list[TrainedModel]()
    for stage, name in enumerate(comparison.stages):
        here = folder / f"{stage + 1}-{name}"
        here.mkdir()
        trained, upscaled = _learn(run, comparison, stage, model, here)
        made += upscaled
        learned.append(trained)
        if stage:
            shutil.rmtree(Path(model).parent)
        model = str(here / "trained")
        losses = _means(_losses_of_texts(model, _texts_after(stage, comparison), run, comparison))
        points.append(Point(len(learned), losses))
    is_certified = (Path(model) / CERTIFICATE).is_file()
    return result_of(run, points, learned, is_certified=is_certified, **made_together(made))


def _learn(
    run: Run, comparison: Comparison, stage: int, model: str, folder: Path
) -> tuple[TrainedModel, list[dict[str, Any]]]:
    """Let a model learn one stage, and return what is known of its training, and of its upscaling before if there was one."""
    variant, corpora = run.variant, [one.corpus for one in comparison.stages.values()]
    made = []
    if variant.upscale_each:
        assert variant.upscale is not None
        keys = with_corpora(variant.upscale, corpora[stage], corpora[:stage])
        made = [upscaled_model(model, folder / "upscaled", run.seed, keys)[1]]
        model = str(folder / "upscaled")
    if variant.function is not None:
        keys = {**variant.train, **run.rate, "corpus": corpora[stage]}
        return taught_model(variant, model, folder / "trained", run.seed, keys), made
    keys = run.stage_keys(comparison, stage, model, folder / "trained")
    if variant.replay is not None and stage:
        keys["corpus"] = str(_replayed(run, corpora[: stage + 1], model, folder))
        keys = {**keys, "corpus_name": None, "corpus_split": None, "text_column": "text"}
    return trained_model(keys), made


def _replayed(run: Run, corpora: Sequence[str], model: str, folder: Path) -> Path:
    """Write the corpus of a stage with a share of earlier ones, and return its path."""
    from midus_hf.compare.rivals import write_replayed  # loads torch
    from midus_hf.saved_models import load_tokenizer

    share, tokens, output = run.variant.replay, tokens_of(run.variant), folder / "replayed.jsonl"
    assert share is not None and tokens is not None
    documents = [_documents("corpus", corpus, run.variant.train) for corpus in corpora]
    write_replayed(output, documents, share, tokens, load_tokenizer(model), run.seed)
    return output


def _one_per_stage(run: Run, comparison: Comparison, folder: Path) -> Result:
    """Train a model per stage from the base, and measure each document by the model of the stage that it is nearest to."""
    from midus_hf.compare.rivals import StageFinder  # loads torch

    assert comparison.embedding_model is not None
    names, texts = list(comparison.stages), list(comparison.texts)
    train = run.variant.train
    documents = {name: _documents(comparison.label(name), path, train) for name, path in comparison.texts.items()}
    corpora = {name: _documents("corpus", stage.corpus, train) for name, stage in comparison.stages.items()}
    validation = {name: _documents("validation", stage.validation, train) for name, stage in comparison.stages.items()}
    finder = StageFinder(comparison.embedding_model, corpora, validation)
    embedded = {name: finder.embed(of_text) for name, of_text in documents.items()}
    models = [_losses_of_texts(comparison.base, texts, run, comparison)]  # the base stands before the first stage
    points, learned, made = [Point(0, _means(models[0]))], list[TrainedModel](), list[dict[str, Any]]()
    for stage, name in enumerate(names):
        here = folder / f"{stage + 1}-{name}"
        here.mkdir()
        model = comparison.base
        if run.variant.upscale is not None:
            model = str(here / "upscaled")
            made.append(upscaled_model(comparison.base, Path(model), run.seed, run.variant.upscale)[1])
        trained, _ = _learn(run, comparison, stage, model, here)
        learned.append(trained)
        models.append(_losses_of_texts(str(here / "trained"), texts, run, comparison))
        shutil.rmtree(here)
        chosen = {text: finder.stages_of(rows, stage + 1) for text, rows in embedded.items()}
        losses = {
            text: [models[which + 1][text][number] for number, which in enumerate(chosen[text])]
            for text in _texts_after(stage, comparison)
        }
        points.append(Point(len(learned), _means(losses)))
    routed = {name: chosen[name].count(stage) / len(chosen[name]) for stage, name in enumerate(names)}
    return result_of(run, points, learned, routed=routed, **made_together(made))


def _texts_after(stage: int, comparison: Comparison) -> list[str]:
    """Return the names of the texts that are measured after a stage; validation texts are measured after the last stage alone."""
    is_last = stage == len(comparison.stages) - 1
    return [name for name in comparison.texts if is_last or name not in comparison.validation]


def _losses_of_texts(model: str, texts: Sequence[str], run: Run, comparison: Comparison) -> dict[str, Losses]:
    """Return the losses of each document of texts, by the text's name, in windows as long as sequences of training."""
    from midus_hf.evaluation.quiet import quiet_libraries
    from midus_hf.evaluation.text_rows import read_rows, text_rows
    from midus_hf.model_names import usable_device
    from midus_hf.saved_models import check_whole, load_model, load_tokenizer

    keys = window_keys(run.variant.train)
    measured: dict[str, Losses] = {}
    with quiet_libraries():
        tokenizer = load_tokenizer(model)
        loaded, missing = load_model(model, "auto", False, device_map=usable_device(None))
        check_whole(model, missing)
        for name in texts:
            documents = _documents(comparison.label(name), comparison.texts[name], run.variant.train)
            rows = text_rows(name, documents, tokenizer, loaded.config, sequence_length=keys["sequence_length"])
            losses = read_rows(loaded.eval(), rows)
            sums, counts = [0.0] * len(documents), [0] * len(documents)
            for document, nats, tokens in zip(
                rows.documents, losses.sums.tolist(), losses.tokens.tolist(), strict=True
            ):
                sums[document] += nats
                counts[document] += tokens
            measured[name] = list(zip(sums, counts, strict=True))
    del loaded
    free_memory()
    return measured


def _means(losses: Mapping[str, Losses]) -> dict[str, float]:
    """Return the loss of each text in nats per token, over all its documents."""
    return {
        name: sum(nats for nats, _ in of_text) / sum(tokens for _, tokens in of_text)
        for name, of_text in losses.items()
    }


def _documents(key: str, path: str, train: Mapping[str, Any]) -> list[str]:
    """Return the documents of a text, read as training reads it; `key` names the text in messages."""
    from midus_hf.topics.corpus import read_corpus

    column = train.get("text_column") or "text"
    named = {"split": train.get("corpus_split"), "name": train.get("corpus_name")} if key == "corpus" else {}
    return read_corpus(path, key=key, text_column=column, **named)[column][:]
