"""The answers of `midus look`, a function per question."""

import dataclasses
from collections.abc import Callable
from typing import Any

from midus_hf.cli.look.request import Model, Texts
from midus_hf.cli.options import needing_harness
from midus_hf.config.errors import RequestError, as_request_error, format_count
from midus_hf.look.page import Answer


def _about(texts: Texts, losses: dict[str, float]) -> tuple[str, dict[str, Any]]:
    """Return a sentence with the texts that the model read and their losses, and the same as the head of a report."""
    read = {
        text.name: {
            "documents": len(set(text.documents)),
            "rows": len(text.rows),
            "tokens": text.num_tokens,
            "loss": losses[text.name],
        }
        for text in texts.rows
    }
    told = ", ".join(f"{name} ({text['tokens']:,} tokens, loss {text['loss']:.4f})" for name, text in read.items())
    return f"{texts.model.name} read {told}.", {"model": texts.model.name, "texts": read}


def usage(texts: Texts) -> Answer:
    """Answer which slots are retrieved, which chapters opened and which blocks fetched, and how evenly."""
    from midus_hf.evaluation.text_rows import row_losses
    from midus_hf.look import usage as used

    model, _ = texts.model.loaded
    losses, counts = {}, {}
    for text in texts.rows:
        with used.record_usage(model) as counts[text.name]:
            losses[text.name] = row_losses(model, text, batch_size=texts.batch_size).mean
    rows = used.usage_rows(counts)
    summary, head = _about(texts, losses)
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


def ablation(texts: Texts) -> Answer:
    """Answer how the loss of each text changes without each added layer, memory and reading of the depth."""
    from midus_hf.look import ablation as parts_lost

    model, _ = texts.model.loaded
    measured = parts_lost.ablate(model, texts.rows, batch_size=texts.batch_size)
    rows = [effect.row() for effect in measured.effects]
    summary, head = _about(texts, measured.losses)
    return Answer(
        title="Loss of texts without parts of the model",
        summary=summary,
        report={**head, "all_of_them_is_the_base": measured.whole_base, "rows": rows},
        finding=parts_lost.ablation_finding(measured),
        tables=[parts_lost.ablation_table(measured)],
        one_scale=True,
        how_to_read=parts_lost.HOW_TO_READ,
        panels=parts_lost.ablation_panels(measured),
        details=lambda: rows,
    )


def touched(asked: Model, documents: dict[str, list[str]], prove: bool) -> Answer:
    """Answer where texts read a memory of known n-grams; all other positions have the logits of the model without the memory."""
    from transformers import AutoConfig

    from midus_hf.look import touched as where_read
    from midus_hf.memories.engram.known_ngrams import check_certificate, read_certificate
    from midus_hf.sources.names import usable_device
    from midus_hf.sources.tokenizers import load_tokenizer

    if prove:
        usable_device(asked.device)
    with as_request_error(f"model is {asked.name!r}, which cannot be loaded", OSError, ValueError):
        config = AutoConfig.from_pretrained(asked.folder, trust_remote_code=False)
        tokenizer = load_tokenizer(str(asked.folder))
    tables = where_read.tables_in(asked.folder, config, tokenizer)
    certificate = read_certificate(asked.folder)
    if certificate is not None:
        check_certificate(certificate, asked.folder, tokenizer)
    read = {
        (name, table.memory): where_read.touched(table, texts, tokenizer)
        for name, texts in documents.items()
        for table in tables
    }
    without = "no certificate, which midus train --protect writes; what is said here was found now"
    summary = f"{asked.name}: {without if certificate is None else 'its certificate fits the folder'}."
    if prove:
        proven = where_read.prove_untouched(*asked.loaded, documents, read)
        summary += f" {proven:,} untouched documents computed: their logits are the same, bit for bit."
    rows = where_read.touched_rows(documents, read, certificate)
    return Answer(
        title="Where texts read a memory",
        summary=summary,
        report={"model": asked.name, "certificate": certificate, "rows": rows},
        tables=[where_read.touched_table(rows)],
        how_to_read=where_read.HOW_TO_READ,
        details=lambda: where_read.document_rows(read),
    )


def glossary(asked: Model, limit: int | None, at_least: float | None, batch_size: int) -> Answer:
    """Answer whether the model reproduces numbers and names of a glossary's texts after entries' names, and which names are found."""
    from midus_hf.look import glossary as entries

    model, _ = asked.loaded
    rows = entries.check_glossary(model, limit, batch_size)
    share, failure = entries.share_of_values(rows), ""
    if at_least is not None and share is None:
        failure = "the texts state no number and no capitalised word, so nothing was measured; expected a value for --at-least."
    elif at_least is not None and share is not None and share < at_least:
        failure = f"{share:.1%} of the values come back; expected at least {at_least:.1%} (--at-least)."
    return Answer(
        title="What the model reproduces of a glossary",
        summary=f"{asked.name}: {format_count(len(rows), 'entry')}.",
        report={"model": asked.name, "share": share, "rows": rows},
        finding=entries.glossary_finding(rows),
        tables=[entries.glossary_table(rows)],
        how_to_read=entries.HOW_TO_READ,
        details=lambda: rows,
        failure=failure,
    )


def answers_about(asked: Model, questions: str, limit: int | None, at_least: float | None) -> Answer:
    """Answer how many questions about a glossary the model answers rightly, beside the texts in front."""
    from midus_hf.look import glossary as entries

    read = entries.read_questions(questions, limit)
    model, tokenizer = asked.loaded
    rows = entries.check_questions(model, tokenizer, asked.name, read)
    share = sum(row["right"] for row in rows) / len(rows)
    is_short = at_least is not None and share < at_least
    return Answer(
        title="What the model answers about a glossary",
        summary=f"{asked.name}: {len(rows):,} questions.",
        report={"model": asked.name, "questions": questions, "share": share, "rows": rows},
        finding=entries.questions_finding(rows),
        tables=[entries.questions_table(rows)],
        how_to_read=entries.HOW_TO_READ_ANSWERS,
        details=lambda: rows,
        failure=f"{share:.1%} of the answers are right; expected at least {at_least:.1%} (--at-least)."
        if is_short
        else "",
    )


def heads(models: list[Model], tasks: list[str], data: str | None, limit: int | None) -> Answer:
    """Answer how important each attention head is for right answers, and how much this differs between the heads of a layer."""
    from midus_hf.look import heads as important_heads
    from midus_hf.sources.names import short_names
    from midus_hf.sources.progress import show_progress

    names = [model.name for model in models]
    rows, tables = {}, []
    with needing_harness():
        from midus_hf.evaluation.harness import Tasks
        from midus_hf.sources.progress import quiet_libraries

        with quiet_libraries():
            questions = Tasks(tasks, data=data)
            for model, label in zip(models, short_names(names), strict=True):
                loaded, tokenizer = model.load()
                answers = list(important_heads.task_answers(loaded, tokenizer, questions, limit))
                bar = show_progress(answers, desc=model.name, unit=" answers")
                importance = important_heads.head_importance(loaded, bar)
                rows[label] = important_heads.heads_rows(label, importance)
                title = f"{label}: {importance.answers:,} answers, {importance.loss:.3f} nats each"
                tables.append(important_heads.heads_table(title, rows[label]))
    return Answer(
        title="How important heads are",
        summary=f"{', '.join(rows)} answered {', '.join(tasks)}.",
        report={
            "models": names,
            "tasks": tasks,
            "limit": limit,
            "rows": [row for each in rows.values() for row in each],
        },
        tables=tables,
        panels=important_heads.heads_panels(rows),
    )


def depth(texts: Texts, layer: int | None = None, head: int | None = None) -> Answer:
    """Answer what share of attention goes to the depth, and which earlier layers are read."""
    from midus_hf.evaluation.text_rows import row_losses
    from midus_hf.look import depth as depth_read

    model, _ = texts.model.loaded
    head_map = None
    if layer is not None and head is not None:
        head_map = depth_read.depth_map(model, texts.rows[0].rows[0][:-1], layer, head)
    with depth_read.record_depth(model) as readings:
        losses = {text.name: row_losses(model, text, batch_size=texts.batch_size).mean for text in texts.rows}
    summary, about = _about(texts, losses)
    return Answer(
        title="What heads read of the depth",
        summary=summary,
        report={**about, "rows": depth_read.depth_rows(readings)},
        finding=depth_read.depth_finding(readings),
        tables=[depth_read.depth_table(readings)],
        how_to_read=depth_read.HOW_TO_READ,
        panels=depth_read.depth_panels(readings, head_map),
    )


def page(texts: Texts) -> Answer:
    """Answer every question about the model that needs only texts: usage, ablation and reading of the depth."""
    from midus_hf.look.depth import record_depth
    from midus_hf.look.usage import record_usage

    model, _ = texts.model.loaded
    answers: dict[str, Callable[[Texts], Answer]] = {}
    for name, record, answer in (("usage", record_usage, usage), ("depth", record_depth, depth)):
        try:
            with record(model):
                answers[name] = answer
        except RequestError:
            continue  # the model has nothing of the kind
    answers["ablation"] = ablation
    sections = {name: answer(texts) for name, answer in answers.items()}
    return Answer(
        title="Inside the model",
        summary=f"{texts.model.name}, on {', '.join(texts.documents)}.",
        finding="\n".join(section.finding for section in sections.values()),
        report={name: section.report for name, section in sections.items()},
        tables=[table for section in sections.values() for table in section.tables],
        sections=[dataclasses.replace(section, finding="") for section in sections.values()],
    )
