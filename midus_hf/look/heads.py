"""Importance of attention heads for a task's answers (MIDUS, equation 20; Bansal et al. 2023)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from midus_hf.anatomy.record import record_of
from midus_hf.config.errors import RequestError
from midus_hf.look.page import Panel, TextTable, curves, grid, table_of
from midus_hf.memories.hosting.parts import decoder_of
from midus_hf.models.view import temporary_hooks

if TYPE_CHECKING:
    from midus_hf.evaluation.harness import Tasks


class Answer(NamedTuple):
    """A prompt and its answer: token ids, `[T]`, int64; the first `prompt_tokens` are the prompt's."""

    ids: torch.Tensor
    prompt_tokens: int


@dataclass(frozen=True)
class HeadImportance:
    """Importance of the heads of a model.

    Args:
        layers: Indices of the measured layers, ascending: all layers whose attention has an output projection.
        base_layers: Index in the base of each measured layer, if the config records the base's layers; otherwise the layer's index.
        absolute: Mean over tokens of `|a_h . dLoss/da_h|`, `[L, H]`, float64 (Bansal et al.). In the last layer only the tokens that
            predict the answer have a gradient, and only these count.
        answers: Number of answers.
        loss: Mean loss per answer, in nats.
    """

    layers: list[int]
    base_layers: list[int]
    absolute: torch.Tensor
    answers: int
    loss: float


def head_importance(model: PreTrainedModel, answers: Iterable[Answer]) -> HeadImportance:
    """Measure the importance of heads for answers: their output times its gradient of the loss.

    A head's output is its part of the input of attention's output projection, for any attention implementation. The loss of an answer
    is summed over its tokens, so scores do not depend on batches. Gradients are taken with respect to activations, not weights.

    Args:
        model: A causal language model, in eval mode.
        answers: Answers to measure, one or more.

    Raises:
        RequestError: If there is no answer, an answer has no token or no prompt, or no layer has an output projection.
    """
    projections = _output_projections(model)
    heads = model.config.get_text_config().num_attention_heads
    last = model.config.get_text_config().num_hidden_layers - 1
    embeddings: Any = model.get_input_embeddings()
    absolute = torch.zeros(len(projections), heads, dtype=torch.float64)
    tokens = torch.zeros(len(projections), 1, dtype=torch.float64)
    count = 0
    total = 0.0
    inputs: list[torch.Tensor] = []
    with temporary_hooks() as hold:
        hold(embeddings.register_forward_hook(lambda module, arguments, output: output.detach().requires_grad_()))
        for projection in projections.values():
            # A pass within the pass, over a text that is named, computes no gradients.
            hold(
                projection.register_forward_pre_hook(
                    lambda module, arguments: inputs.append(arguments[0]) if torch.is_grad_enabled() else None
                )
            )
        for answer in answers:
            if not 0 < answer.prompt_tokens < len(answer.ids):
                raise RequestError(
                    f"an answer has {len(answer.ids)} tokens, {answer.prompt_tokens} of them in the prompt; expected some of each."
                )
            inputs.clear()
            ids = answer.ids.to(embeddings.weight.device).unsqueeze(0)
            with torch.enable_grad():
                logits = model(input_ids=ids, use_cache=False).logits[0, answer.prompt_tokens - 1 : -1].float()
                loss = F.cross_entropy(logits, ids[0, answer.prompt_tokens :], reduction="sum")
                gradients = torch.autograd.grad(loss, inputs)
            predicting = len(answer.ids) - answer.prompt_tokens
            for row, (layer, read, gradient) in enumerate(zip(projections, inputs, gradients, strict=True)):
                products = (read.detach().double() * gradient.double()).unflatten(-1, (heads, -1)).sum(-1)[0]  # [T, H]
                absolute[row] += products.abs().sum(0).cpu()
                tokens[row] += predicting if layer == last else len(answer.ids) - 1
            count += 1
            total += loss.item()
    if count == 0:
        raise RequestError("there is no answer to measure; expected one or more.")
    record = record_of(model.config)
    layers = list(projections)
    base = record.base_layers if record is not None else {}
    base_layers = [base.get(layer, layer) if base else layer for layer in layers]
    return HeadImportance(layers, base_layers, absolute / tokens, count, total / count)


def _output_projections(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Return attention's output projection by layer, except where memories read heads unprojected."""
    layers: Any = decoder_of(model).layers
    projections = {
        index: layer.self_attn.o_proj
        for index, layer in enumerate(layers)
        if isinstance(getattr(getattr(layer, "self_attn", None), "o_proj", None), nn.Module)
    }
    if not projections:
        raise RequestError(
            f"no layer of this {model.config.model_type} model has an output projection; expected a decoder with some."
        )
    return projections


def task_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: "Tasks", limit: int | None = None
) -> Iterator[Answer]:
    """Yield each question of some tasks with its right answer, as the harness scores it, zero-shot."""
    from lm_eval.models.huggingface import HFLM

    harness = HFLM(model, backend="causal", tokenizer=tokenizer, batch_size=1)
    for name, task in tasks.load(limit)["tasks"].items():
        if task.OUTPUT_TYPE not in ("multiple_choice", "generate_until"):
            raise RequestError(
                f"task {name!r} has output type {task.OUTPUT_TYPE!r}; expected multiple_choice or generate_until."
            )
        for document in list(task.eval_docs)[:limit]:
            context = task.fewshot_context(document, num_fewshot=0)
            prompt, answer = harness._encode_pair(context, _right_answer(name, task, document))
            yield Answer(torch.tensor([*prompt, *answer]), len(prompt))


def _right_answer(name: str, task: Any, document: Any) -> str:
    """Return the delimiter after a prompt and the right answer of a question."""
    target = task.doc_to_target(document)
    if task.OUTPUT_TYPE == "multiple_choice" and isinstance(target, int) and target >= 0:
        target = task.doc_to_choice(document)[target]
    if isinstance(target, list) and target:
        target = target[0]
    if not isinstance(target, str) or not target:
        raise RequestError(f"task {name!r} has a question whose answer is {target!r}; expected a text.")
    return f"{task.config.target_delimiter}{target}"


def heads_rows(model: str, importance: HeadImportance) -> list[dict[str, Any]]:
    """Return a row per layer: importance of heads, mean, variance (figure 4c) and the best head."""
    rows = []
    for layer, base_layer, heads in zip(importance.layers, importance.base_layers, importance.absolute, strict=True):
        best = int(heads.argmax())
        measures = {"mean": heads.mean().item(), "variance": heads.var(correction=0).item(), "most": best}
        layers = {"model": model, "layer": layer, "base_layer": base_layer}
        rows.append({**layers, **measures, "largest": heads[best].item(), "importance": heads.tolist()})
    return rows


def heads_table(title: str, rows: Sequence[Mapping[str, Any]]) -> TextTable:
    """Return a table of rows of `heads_rows`."""
    columns = {"layer": "{layer}", "of the base": "{base_layer}", "mean": "{mean:.4g}", "variance": "{variance:.4g}"}
    return table_of(title, rows, {**columns, "head": "{most}", "its importance": "{largest:.4g}"})


def heads_panels(models: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Panel]:
    """Return panels from rows by model: a map of heads by layers each, and variances of layers."""
    every = [row for rows in models.values() for row in rows]
    numbers = [str(head) for head in range(len(every[0]["importance"]))]
    most = max(row["largest"] for row in every)
    panels = {
        name: grid(
            [row["importance"] for row in rows],
            "head",
            "layer of the base",
            columns=numbers,
            lines=[str(row["base_layer"]) for row in rows],
            most=most,
        )
        for name, rows in models.items()
    }
    variances = {
        name: ([row["base_layer"] for row in rows], [row["variance"] for row in rows]) for name, rows in models.items()
    }
    return {**panels, "variance over heads": curves(variances, "layer of the base", "variance")}
