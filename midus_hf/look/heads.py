"""Importance of attention heads for the answers of a task (MIDUS, equation 20; Bansal et al. 2023).

The results are also a table, JSON, and a picture as in figure 4 of MIDUS.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from midus_hf.look.page import TableOfWords
from midus_hf.look.pictures import new_figure
from midus_hf.look.watched_models import held_hooks
from midus_hf.models.parts import decoder_of

if TYPE_CHECKING:
    from midus_hf.evaluation.harness import Tasks


class Answer(NamedTuple):
    """A prompt and its answer.

    Args:
        ids: Token ids of the prompt and the answer, `[T]`, int64.
        prompt_tokens: Number of tokens of the prompt, from 1 to T - 1.
    """

    ids: torch.Tensor
    prompt_tokens: int


@dataclass(frozen=True)
class HeadImportance:
    """Importance of the heads of a model.

    Args:
        layers: Indices of the measured layers, ascending: all layers whose attention has an output projection.
        base_layers: Index in the base of each measured layer, if the config records the base's layers; otherwise its own index.
        signed: Mean over answers of `sum_t a_h . dLoss/da_h`, `[L, H]`, float64 (equation 20).
        absolute: Mean over tokens of `|a_h . dLoss/da_h|`, `[L, H]`, float64 (Bansal et al.). In the last layer only the tokens
            that predict the answer have a gradient, and only these tokens count.
        answers: Number of answers.
        loss: Mean loss per answer, in nats.
    """

    layers: list[int]
    base_layers: list[int]
    signed: torch.Tensor
    absolute: torch.Tensor
    answers: int
    loss: float

    def variances(self, absolute: bool = True) -> torch.Tensor:
        """Return the variance over the heads of each layer, `[L]` (figure 4c).

        Args:
            absolute: Whether to use `absolute` instead of `signed`. Default: True.
        """
        return (self.absolute if absolute else self.signed).var(dim=1, correction=0)


def head_importance(
    model: PreTrainedModel, answers: Iterable[Answer], progress: Callable[[], Any] | None = None
) -> HeadImportance:
    """Measure how much heads matter for answers, by the product of each head's output and its gradient of the loss.

    A head's output is its part of the input of attention's output projection, whichever attention computed it. The loss of an
    answer is summed over the answer's tokens, so that scores do not depend on how answers would be batched. The model is not
    changed: gradients are taken with respect to activations, not weights.

    Args:
        model: A causal language model, in eval mode.
        answers: Answers to measure, one or more.
        progress: Called without arguments after each answer. Default: none.

    Raises:
        ValueError: If there is no answer, an answer has no token or no prompt, or no layer has an output projection.
    """
    projections = _output_projections(model)
    heads = model.config.get_text_config().num_attention_heads
    last = model.config.get_text_config().num_hidden_layers - 1
    embeddings: Any = model.get_input_embeddings()
    device = embeddings.weight.device
    signed = torch.zeros(len(projections), heads, dtype=torch.float64)
    absolute = torch.zeros_like(signed)
    tokens = torch.zeros(len(projections), 1, dtype=torch.float64)
    count, total = 0, 0.0
    inputs: list[torch.Tensor] = []
    with _frozen(model), held_hooks() as hold:
        for projection in projections.values():
            hold(projection.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0])))
        for answer in answers:
            if not 0 < answer.prompt_tokens < len(answer.ids):
                raise ValueError(
                    f"an answer has {len(answer.ids)} tokens, of which the prompt has {answer.prompt_tokens}; expected some of each."
                )
            inputs.clear()
            ids = answer.ids.to(device).unsqueeze(0)
            with torch.enable_grad():
                embedded = embeddings(ids).detach().requires_grad_()
                logits = (
                    model(inputs_embeds=embedded, use_cache=False).logits[0, answer.prompt_tokens - 1 : -1].float()
                )
                loss = F.cross_entropy(logits, ids[0, answer.prompt_tokens :], reduction="sum")
                gradients = torch.autograd.grad(loss, inputs)
            predicting = len(answer.ids) - answer.prompt_tokens
            for row, (layer, read, gradient) in enumerate(zip(projections, inputs, gradients, strict=True)):
                products = (read.detach().double() * gradient.double()).unflatten(-1, (heads, -1)).sum(-1)[0]  # [T, H]
                signed[row] += products.sum(0).cpu()
                absolute[row] += products.abs().sum(0).cpu()
                tokens[row] += predicting if layer == last else len(answer.ids) - 1
            count, total = count + 1, total + loss.item()
            if progress is not None:
                progress()
    if count == 0:
        raise ValueError("there is no answer to measure; expected one or more.")
    layers = list(projections)
    return HeadImportance(layers, _base_layers(model, layers), signed / count, absolute / tokens, count, total / count)


def _output_projections(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Return attention's output projection by layer. Inserted layers whose memory reads heads unprojected are left out."""
    layers: Any = decoder_of(model).layers
    projections = {
        index: layer.self_attn.o_proj
        for index, layer in enumerate(layers)
        if isinstance(getattr(getattr(layer, "self_attn", None), "o_proj", None), nn.Module)
    }
    if not projections:
        raise ValueError(
            f"no layer of this {model.config.model_type} model has an output projection; expected a decoder with some."
        )
    return projections


@contextlib.contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Freeze all weights while the context is open."""
    training = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in training:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in training:
            parameter.requires_grad_(True)


def _base_layers(model: PreTrainedModel, layers: list[int]) -> list[int]:
    plan = (getattr(model.config, "upscale", None) or {}).get("plan") or []
    of_base = {index: entry["base"] for index, entry in enumerate(plan) if "base" in entry}
    return [of_base.get(layer, layer) if of_base else layer for layer in layers]


def task_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: "Tasks", limit: int | None = None
) -> Iterator[Answer]:
    """Yield each question of some tasks with its right answer, as the harness would score it, without worked examples.

    Args:
        model: The model that will answer.
        tokenizer: The model's tokenizer.
        tasks: Tasks of multiple choice or of generated text.
        limit: Number of questions per task, from the first on. Default: all.

    Raises:
        ModuleNotFoundError: If lm-eval, which is an extra, is not installed.
        ValueError: If a task is of another kind, or a question has several right answers or none that is known.
    """
    from midus_hf.evaluation.harness import MidusLM

    harness = MidusLM(model, tokenizer=tokenizer, batch_size=1)
    for name, task in tasks.built().items():
        if task.OUTPUT_TYPE not in ("multiple_choice", "generate_until"):
            raise ValueError(
                f"task {name!r} has output type {task.OUTPUT_TYPE!r}; expected multiple_choice or generate_until."
            )
        for document in list(task.eval_docs)[:limit]:
            context = task.fewshot_context(document, num_fewshot=0)
            prompt, answer = harness._encode_pair(context, _right_answer(name, task, document))
            yield Answer(torch.tensor([*prompt, *answer]), len(prompt))


def _right_answer(name: str, task: Any, document: Any) -> str:
    """Return the right answer of a question, with the delimiter in front that separates a prompt from its answer."""
    target = task.doc_to_target(document)
    if task.OUTPUT_TYPE == "multiple_choice":
        if not isinstance(target, int) or target < 0:
            raise ValueError(
                f"task {name!r} has a question whose right choice is {target!r}; expected the index of a choice."
            )
        target = task.doc_to_choice(document)[target]
    if isinstance(target, list) and target:
        target = target[0]
    if not isinstance(target, str) or not target:
        raise ValueError(f"task {name!r} has a question whose answer is {target!r}; expected a text.")
    return f"{task.config.target_delimiter}{target}"


def layers_table(name: str, importance: HeadImportance, absolute: bool) -> TableOfWords:
    """Return a table with a row per layer: mean and variance over its heads, and the head that matters most."""
    scores, variances = _form(importance, absolute), importance.variances(absolute)
    rows = []
    for row, layer in enumerate(importance.layers):
        best = int(scores[row].argmax())
        cells = [f"{scores[row].mean():.4g}", f"{variances[row]:.4g}", str(best), f"{scores[row, best]:.4g}"]
        rows.append([str(layer), str(importance.base_layers[row]), *cells])
    title = f"{name}: {importance.answers:,} answers, {importance.loss:.3f} nats each"
    return TableOfWords(title, ["layer", "of the base", "mean", "variance", "head", "its importance"], rows)


def as_json(importances: Mapping[str, HeadImportance]) -> list[dict[str, Any]]:
    """Return all numbers, for other programs, by the models' names."""
    return [
        {
            "model": name,
            "answers": one.answers,
            "loss": one.loss,
            "layers": one.layers,
            "base_layers": one.base_layers,
            "signed": one.signed.tolist(),
            "absolute": one.absolute.tolist(),
            "variance_signed": one.variances(False).tolist(),
            "variance_absolute": one.variances(True).tolist(),
        }
        for name, one in importances.items()
    ]


def draw_heads(importances: Mapping[str, HeadImportance], absolute: bool) -> Any:
    """Return a figure with a map of heads by layers per model, on one scale, and the variances of layers. Needs matplotlib.

    Layers are numbered as in the base, so that models can be compared side by side.
    """
    maps = {name: _form(one, absolute) for name, one in importances.items()}
    low = min(float(scores.min()) for scores in maps.values())
    high = max(float(scores.max()) for scores in maps.values())
    tallest = max(len(one.layers) for one in importances.values())
    figure = new_figure(4.2 * (len(maps) + 1), 1.5 + 0.2 * tallest)
    all_axes = figure.subplots(1, len(maps) + 1)
    image: Any = None
    for axes, (name, scores) in zip(all_axes, maps.items(), strict=False):
        layers = importances[name].base_layers
        image = axes.imshow(scores.numpy(), aspect="auto", vmin=low, vmax=high, origin="lower", cmap="viridis")
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("head")
        axes.set_ylabel("layer of the base")
        axes.set_yticks(range(0, len(layers), max(1, len(layers) // 10)), layers[:: max(1, len(layers) // 10)])
    figure.colorbar(image, ax=list(all_axes[:-1]), label="importance")
    for name, one in importances.items():
        all_axes[-1].plot(one.base_layers, one.variances(absolute).numpy(), marker=".", label=name)
    all_axes[-1].set_xlabel("layer of the base")
    all_axes[-1].set_title("variance over heads", fontsize=9)
    all_axes[-1].legend(fontsize=7)
    return figure


def _form(importance: HeadImportance, absolute: bool) -> Any:
    return importance.absolute if absolute else importance.signed
