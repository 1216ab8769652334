"""Whether a run learned, and what it forgot, in lines that end the run."""

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState

from midus_hf.evaluation.asking import glossary_of
from midus_hf.models.view import ModelView

if TYPE_CHECKING:
    from datasets import Dataset

#: Names of texts that a run measures by itself, in logs and in lines.
HELD_OUT, OWN_TEXT, GLOSSARY = "held_out", "own_text", "glossary"
_LABELS = {
    HELD_OUT: "held-out texts",
    OWN_TEXT: "texts that the model wrote before training",
    GLOSSARY: "texts of the glossary",
    "": "held-out text",
}
# Texts that the model knows before training, and which it should keep.
_KEPT = (OWN_TEXT, GLOSSARY)
# Own texts, and their tokens; texts of a glossary, the first ones.
_NUM_TEXTS, _NUM_TOKENS = 8, 48
_NUM_ENTRIES, _ENTRY_TOKENS = 32, 128
# Nats per token: less is nothing learned, more is worse, more is forgotten, and a loss that rises.
_NOTHING, _WORSE, _FORGOTTEN, _RISEN = 0.01, 0.005, 0.05, 0.1


class MeasureAtEnd(TrainerCallback):
    """Measures held-out texts after the last step, where the strategy measures at no end of an epoch."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if args.eval_strategy != "epoch" and state.global_step >= state.max_steps:
            control.should_evaluate = True


def measured_texts(
    held_out: "Dataset", model: Any, tokenizer: PreTrainedTokenizerBase, arguments: Any
) -> dict[str, "Dataset"]:
    """Return what a run measures: held-out texts, texts of the model's glossary, and texts that the model itself writes.

    The last only if one process has the whole model.
    """
    measured = {HELD_OUT: held_out}
    if (glossary := glossary_of(model)) is not None and len(glossary) > 0:
        measured[GLOSSARY] = _tokenize_entries(glossary, tokenizer)
    layouts = getattr(ModelView(model).banks, "layouts", {}).values()
    reads_without_blocks = all(layout.blocks.without_ids == "generic" for layout in layouts)
    if arguments.world_size > 1 or arguments.config_name is not None or not reads_without_blocks:
        return measured
    measured[OWN_TEXT] = write_own_texts(model.to(arguments.device), tokenizer, arguments.seed)
    return measured


def write_own_texts(model: Any, tokenizer: PreTrainedTokenizerBase, seed: int) -> "Dataset":
    """Return texts that a model samples after its first token, as rows with `input_ids`.

    What they lose by training is what the model forgets: their loss rises by the divergence of the trained model from this one.
    """
    from datasets import Dataset

    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    begin = torch.full((_NUM_TEXTS, 1), first, device=model.device)
    was_training = model.training
    model.eval()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        lengths = {"min_new_tokens": _NUM_TOKENS, "max_new_tokens": _NUM_TOKENS}
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
        ids = model.generate(begin, attention_mask=torch.ones_like(begin), pad_token_id=first, **lengths, **sampling)
    model.train(was_training)
    return Dataset.from_dict({"input_ids": ids.tolist()})


def _tokenize_entries(glossary: Any, tokenizer: PreTrainedTokenizerBase) -> "Dataset":
    from datasets import Dataset

    texts = [entry.text for entry in itertools.islice(glossary, _NUM_ENTRIES)]
    return Dataset.from_dict({"input_ids": [tokenizer(text)["input_ids"][:_ENTRY_TOKENS] for text in texts]})


def describe_outcome(log: Sequence[Mapping[str, Any]], saved_step: int, rates: str) -> tuple[list[str], list[str]]:
    """Return lines on what a run learned, and warnings with their remedy.

    Args:
        log: Events of a Trainer: `eval_loss` or `eval_NAME_loss` at step 0 and at the saved step, and training losses, in nats.
        saved_step: Step of the model that is saved.
        rates: The rates of the run, as the remedy names them.
    """
    lines = []
    warnings = []
    changes = []
    lower = f"train again at lower rates than {rates}"
    for name, before, after in _measured(log, saved_step):
        label = _LABELS.get(name, name)
        change = after - before
        lines.append(f"{label}: {before:.4f} nats per token before training, {after:.4f} after ({change:+.4f})")
        if name in _KEPT:
            if change > _FORGOTTEN:
                warnings.append(
                    f"the model forgets: {label} lost {change:.2f} nats per token; {lower}, or with base_kl"
                )
            continue
        changes.append(change)
        if change > _WORSE:
            warnings.append(f"the trained model is worse than the one before on {label}: {lower}")
    if changes and all(-_NOTHING < change <= _WORSE for change in changes):
        warnings.append(
            f"nothing was learned of measured texts: train for more steps, or at higher rates than {rates}"
        )
    if divergences := [event["base_divergence"] for event in log if "base_divergence" in event]:
        lines.append(
            f"divergence from the base on the texts trained on: {divergences[-1]:.4f} nats per token at the end"
        )
    losses = [event["loss"] for event in log if "loss" in event]
    third = len(losses) // 3
    if third >= 2:
        risen = (sum(losses[-third:]) - sum(losses[-2 * third : -third])) / third
        if risen > _RISEN:
            warnings.append(f"the training loss rose by {risen:.2f} nats in the last third of the steps: {lower}")
    return lines, warnings


def _measured(log: Sequence[Mapping[str, Any]], saved_step: int) -> list[tuple[str, float, float]]:
    """Return measured texts with their losses before the first step and of the saved model."""
    losses: dict[str, dict[int, float]] = {}
    for event in log:
        for key, value in event.items():
            if key.startswith("eval_") and key.endswith("loss"):
                name = key.removeprefix("eval_").removesuffix("loss").removesuffix("_")
                losses.setdefault(name, {})[event["step"]] = value
    return [
        (name, by_step[0], by_step[saved_step]) for name, by_step in losses.items() if {0, saved_step} <= {*by_step}
    ]
