"""The answers of `midus look`, a function per question."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from midus_hf.cli.look.request import Request
from midus_hf.cli.options import needing_harness
from midus_hf.evaluation.text_rows import row_losses
from midus_hf.look import ablation as parts_lost
from midus_hf.look import depth as depth_read
from midus_hf.look import drift as moved
from midus_hf.look import glossary as entries
from midus_hf.look import heads as important_heads
from midus_hf.look import touched as where_read
from midus_hf.look import usage as used
from midus_hf.look.page import Answer
from midus_hf.short_names import short_names


def _about(request: Request, losses: dict[str, float]) -> tuple[str, dict[str, Any]]:
    """Return a sentence that says what the model read, with which losses, and the same as the head of a report."""
    texts = {
        text.name: {
            "documents": len(set(text.documents)),
            "rows": len(text.rows),
            "tokens": text.num_tokens,
            "loss": losses[text.name],
        }
        for text in request.text_rows
    }
    read = ", ".join(f"{name} ({text['tokens']:,} tokens, loss {text['loss']:.4f})" for name, text in texts.items())
    return f"{request.model} read {read}.", {"model": request.model, "texts": texts}


def usage(request: Request) -> Answer:
    """Answer which slots are retrieved, which chapters opened and which blocks fetched, and how evenly."""
    model, _ = request.loaded
    losses, counts = {}, {}
    for text in request.text_rows:
        with used.record_usage(model) as counts[text.name]:
            losses[text.name] = row_losses(model, text, batch_size=request.batch_size).mean
    rows = used.usage_rows(counts)
    summary, head = _about(request, losses)
    return Answer(
        title="What texts use of the memories",
        summary=summary,
        report={**head, "rows": rows},
        finding=used.usage_finding(rows),
        tables=[used.usage_table(rows)],
        one_scale=True,
        panels=used.usage_panels(counts),
        details=lambda: used.every_count(counts),
    )


def ablation(request: Request) -> Answer:
    """Answer how the loss of each text changes without each added layer, memory and reading of the depth."""
    model, _ = request.loaded
    measured = parts_lost.ablate(model, request.text_rows, batch_size=request.batch_size)
    rows = [effect.row() for effect in measured.effects]
    summary, head = _about(request, measured.losses)
    return Answer(
        title="What texts lose without parts of the model",
        summary=summary,
        report={**head, "all_of_them_is_the_base": measured.whole_base, "rows": rows},
        finding=parts_lost.ablation_finding(measured),
        tables=[parts_lost.ablation_table(measured)],
        one_scale=True,
        how_to_read=parts_lost.HOW_TO_READ,
        panels=parts_lost.ablation_panels(measured),
        details=lambda: rows,
    )


def drift(request: Request) -> Answer:
    """Answer how far predictions moved from the base's: divergence, first choices and loss."""
    model, _ = request.loaded
    logits_of_base = _logits_of_base(request)
    drifts = moved.drift(model, logits_of_base, request.text_rows, batch_size=request.batch_size)
    base = "its base, which is the model without what was added" if request.base == "self" else request.base
    rows = moved.drift_rows(drifts)
    about = {"model": request.model, "base": request.base}
    return Answer(
        title="How far predictions moved",
        summary=f"{request.model} compared with {base}.",
        report={**about, "rows": rows},
        finding=moved.drift_finding(drifts),
        tables=[moved.drift_table(drifts)],
        how_to_read=moved.HOW_TO_READ,
        details=lambda: rows,
    )


def _logits_of_base(request: Request) -> moved.LogitsOfBase:
    """Return a function that computes the base's logits."""
    model, tokenizer = request.loaded
    if request.base == "self":
        return moved.base_within(model)
    base, base_tokenizer = request.load(request.base, "base")
    if base_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"base is {request.base!r}, whose tokenizer has other tokens than the model's; expected one tokenizer."
        )
    return moved.other_base(model, base)


def touched(request: Request) -> Answer:
    """Answer where texts read a memory of known n-grams; all other positions have the logits of the model without the memory."""
    from transformers import AutoConfig

    from midus_hf.model_names import usable_device
    from midus_hf.saved_models import as_value_error, load_tokenizer
    from midus_hf.training.protection import check_certificate, compare_texts, read_certificate

    if request.prove:
        usable_device(request.device)
    with as_value_error(f"model is {request.model!r}, which cannot be loaded", OSError, ValueError):
        config = AutoConfig.from_pretrained(request.folder, trust_remote_code=False)
        tokenizer = load_tokenizer(str(request.folder))
    tables = where_read.tables_in(request.folder, config, tokenizer)
    certificate = read_certificate(request.folder)
    if certificate is not None:
        check_certificate(certificate, request.folder, tokenizer)
    read = {
        (name, table.memory): where_read.touched(table, documents, tokenizer)
        for name, documents in request.documents.items()
        for table in tables
    }
    summary = f"{request.model}: {'no certificate' if certificate is None else 'its certificate fits the folder'}."
    if request.prove:
        model, _ = request.load(request.model)
        proven = 0
        for (name, memory), counts in read.items():
            documents = [
                document
                for document, reading in zip(request.documents[name], counts.reading.tolist(), strict=True)
                if not reading
            ]
            compared = compare_texts(model, tokenizer, documents, [memory])
            if compared.differing:
                raise RuntimeError(
                    f"{len(compared.differing)} untouched documents of {name} have other logits with memory {memory!r} than without "
                    "it. This is a fault of midus_hf: please report it."
                )
            proven += len(documents)
        summary += f" {proven:,} untouched documents computed: their logits are the same, bit for bit."
    rows = where_read.touched_rows(request.documents, read, certificate)
    return Answer(
        title="Where texts read a memory",
        summary=summary,
        report={"model": request.model, "certificate": certificate, "rows": rows},
        tables=[where_read.touched_table(rows)],
        how_to_read=where_read.HOW_TO_READ,
        details=lambda: where_read.document_rows(read),
    )


def glossary(request: Request) -> Answer:
    """Answer whether numbers and names of a glossary's texts come back behind the names of its entries, and which names are found."""
    model, _ = request.loaded
    rows = entries.glossary_rows(entries.check_glossary(model, request.limit, request.batch_size))
    share, failure = entries.share_of_values(rows), ""
    if request.at_least is not None and share < request.at_least:
        failure = f"{share:.1%} of the values come back; expected {request.at_least:.1%} at least (--at-least)."
    return Answer(
        title="What a glossary gives back",
        summary=f"{request.model}: {len(rows):,} entries.",
        report={"model": request.model, "share": share, "rows": rows},
        finding=entries.glossary_finding(rows),
        tables=[entries.glossary_table(rows)],
        how_to_read=entries.HOW_TO_READ,
        details=lambda: rows,
        failure=failure,
    )


def heads(request: Request) -> Answer:
    """Answer how much each head of attention matters for right answers, and how much heads of a layer differ in that."""
    names = request.task_names
    rows, tables = {}, []
    with needing_harness():
        from midus_hf.evaluation.harness import Tasks
        from midus_hf.evaluation.quiet import quiet_libraries

        with quiet_libraries():
            tasks = Tasks(names, data=request.data)
            for model, label in zip(request.models, short_names(request.models), strict=True):
                loaded, tokenizer = request.load(model)
                answers = list(important_heads.task_answers(loaded, tokenizer, tasks, request.limit))
                bar = tqdm(answers, desc=model, unit=" answers", disable=None)
                importance = important_heads.head_importance(loaded, bar)
                rows[label] = important_heads.heads_rows(label, importance)
                title = f"{label}: {importance.answers:,} answers, {importance.loss:.3f} nats each"
                tables.append(important_heads.heads_table(title, rows[label]))
    return Answer(
        title="How much heads matter",
        summary=f"{', '.join(rows)} answered {', '.join(names)}.",
        report={
            "models": request.models,
            "tasks": names,
            "limit": request.limit,
            "rows": [row for each in rows.values() for row in each],
        },
        tables=tables,
        panels=important_heads.heads_panels(rows),
    )


def depth(request: Request) -> Answer:
    """Answer which share of attention goes to the depth, and which earlier layers are read."""
    model, _ = request.loaded
    head_map = None
    if request.layer is not None and request.head is not None:
        head_map = depth_read.depth_map(model, request.text_rows[0].rows[0][:-1], request.layer, request.head)
    with depth_read.record_depth(model) as readings:
        losses = {text.name: row_losses(model, text, batch_size=request.batch_size).mean for text in request.text_rows}
    summary, about = _about(request, losses)
    return Answer(
        title="What heads read of the depth",
        summary=summary,
        report={**about, "rows": depth_read.depth_rows(readings)},
        finding=depth_read.depth_finding(readings),
        tables=[depth_read.depth_table(readings)],
        how_to_read=depth_read.HOW_TO_READ,
        panels=depth_read.depth_panels(readings, head_map),
    )


def page(request: Request) -> Answer:
    """Answer every question that texts answer about the model: usage, ablation, drift and reading of the depth."""
    model, _ = request.loaded
    answers: dict[str, Callable[[Any], Answer]] = {}
    for name, record, answer in (("usage", used.record_usage, usage), ("depth", depth_read.record_depth, depth)):
        with contextlib.suppress(ValueError), record(model):  # refused if the model has nothing of the kind
            answers[name] = answer
    answers |= {"ablation": ablation, "drift": drift}
    sections = {name: answer(request) for name, answer in answers.items()}
    return Answer(
        title="Inside the model",
        summary=f"{request.model}, on {', '.join(request.documents)}.",
        finding="\n".join(section.finding for section in sections.values()),
        report={name: section.report for name, section in sections.items()},
        tables=[table for section in sections.values() for table in section.tables],
        sections=[dataclasses.replace(section, finding="") for section in sections.values()],
    )
