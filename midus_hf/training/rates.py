"""Rates that fit model, method and text: how far a first step of AdamW helps.

The first step of AdamW moves each number by its rate against the sign of its gradient, whatever the gradient's size. Along this line
the loss of other texts falls, turns and rises, about as `a r - b r^2`. A run gets `SHARE` of the rate where it turns, and half of it
where the rate is constant, which goes twice as far as one that falls. New decoder layers get all of it: the first step moves few of
their matrices. Tables of which it moves few rows get half: in a run, texts also read rows that others have moved.

New parts end in zeros, and what is before the zeros has no gradient in the first step: it learns at `NEW_RATE`, and limits the rate
of zeros in its group, since AdamW moves it by this rate too.
"""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from midus_hf.anatomy.record import record_of
from midus_hf.data.packing import IGNORED_LABEL
from midus_hf.data.stream import StreamedSequences
from midus_hf.memories.hierarchical.training import BLOCKS_GROUP
from midus_hf.memories.module import DeclaredModule
from midus_hf.sources.progress import show_progress
from midus_hf.training.keys import NEW_RATE, Rates, short_run_rates
from midus_hf.training.optim import parameter_groups

#: Share of the rate where the loss turns that a run gets (experiments/LOG.md).
SHARE = 0.55
#: The same for decoder layers that are new.
LAYERS_SHARE = 1.0
#: What tables get of this share if the first step moves fewer than `_FEW_ROWS` of their rows.
FEW_ROWS_SHARE = 0.5
_FEW_ROWS = 0.25
#: Most that a step moves matrices without a gradient yet, of their root mean square.
_MAX_STEP = 0.15
#: Rate of a whole model that is not measured.
BASE_RATE = 1e-4
# The key of each group's rate; of other groups it is `learning_rate`.
_KEYS = {"values": "value_learning_rate", "gains": "gain_learning_rate"}
# Batches of the gradient, and of the loss along its signs.
_GRADIENT_BATCHES, _LOSS_BATCHES = 2, 2
_FIRST_GAIN = 0.01  # nats per token that the gradient promises of the first rate
_BFLOAT16_NOISE = 0.13  # nats by which the rounding of bfloat16 may change a token's loss: three standard deviations
_FACTOR = math.sqrt(10)  # from one rate to the next
_MAX_RATES = 12


@dataclasses.dataclass
class FoundRates:
    """Rates of a run by key, and why; `print` writes them as a sentence."""

    rates: dict[str, float]
    turns: dict[str, float]  #: by key, the rate at which a first step helps most
    reason: str = ""  #: why nothing was measured
    is_limited: bool = False  #: whether tensors without a gradient limit a rate

    def __str__(self) -> str:
        named = ", ".join(f"{key} {rate:g}" for key, rate in self.rates.items())
        if not self.turns:
            return f"{named}: the usual ones, since {self.reason}; set learning_rate to choose"
        at = " and ".join(f"{key} {rate:.2g}" for key, rate in self.turns.items())
        limited = ", less than that for tensors that have no gradient yet" if self.is_limited else ""
        part = "a part of it" if any(self.rates[key] < 0.9 * turn for key, turn in self.turns.items()) else "it"
        return f"{named}: a first step helps these texts most at {at}, and a run gets {part}{limited}"


def describe_rates(rates: Rates) -> str:
    """Return the rates that are set, such as `learning_rate 0.001, value_learning_rate 0.01`."""
    names = [each.name for each in dataclasses.fields(Rates) if each.name.endswith("rate")]
    return ", ".join(f"{name} {getattr(rates, name):g}" for name in names if getattr(rates, name) is not None)


def find_rates(trainer: Any, trains_new: bool) -> FoundRates:
    """Find the rates of a run whose `learning_rate` is None, on texts that it trains on.

    All tensors, gradients, random numbers and streams are left as they were. Processes find them on the same sequences.

    Args:
        trainer: A `MemoryTrainer` before its first step.
        trains_new: Whether only adapters or new parts train: what has no gradient before its first step learns at `NEW_RATE`.
    """
    rates = short_run_rates(NEW_RATE) if trains_new else {"learning_rate": BASE_RATE}
    groups = parameter_groups(trainer.model, _unit_rates(trainer.args))
    has_values = any(group["name"] in ("values", BLOCKS_GROUP) for group in groups)
    if not has_values or _is_given("value_learning_rate", trainer.args):
        rates.pop("value_learning_rate", None)
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return FoundRates(rates, {}, "processes that share parameters measure none")
    with _restored(trainer), show_progress(desc="finding a rate", unit=" batches", leave=False) as bar:
        search = _LineSearch(trainer, groups, bar)
        turns = search.find_turns({key for key in search.keys if not _is_given(key, trainer.args)})
    is_limited = False
    share = LAYERS_SHARE if trains_new and _trains_only_layers(trainer.model) else SHARE
    for key, turn in turns.items():
        rate = turn * (share / 2 if search.is_constant[key] else share)
        if search.moves_few_rows[key]:
            rate *= FEW_ROWS_SHARE
        limit = search.limits.get(key, math.inf)
        is_limited |= rate > limit
        rates[key] = float(f"{min(rate, limit):.2g}")
    reason = "no step along the gradient helps texts that it was not computed of"
    return FoundRates(rates, turns, reason, is_limited)


class _LineSearch:
    """The loss of some batches, after steps of one rate along the signs of other batches' gradient."""

    def __init__(self, trainer: Any, groups: list[dict[str, Any]], bar: Any):
        self._trainer = trainer
        self._bar = bar
        batches = list(_batches(trainer, _GRADIENT_BATCHES + _LOSS_BATCHES))
        count = max(1, len(batches) - _LOSS_BATCHES)
        self._batches = batches[count:] or batches
        for batch in batches[:count]:
            (self._compute_loss(batch) / count).backward()
        self._steps: dict[str, list[_Step]] = {}  # by key, at a rate of 1
        self._slopes: dict[str, float] = {}  # what the gradient promises of them
        self.is_constant: dict[str, bool] = {}  #: by key, whether its schedule is constant
        self.moves_few_rows: dict[
            str, bool
        ] = {}  #: by key, whether it has a table of which most rows have no gradient
        self.limits: dict[str, float] = {}  #: by key, the largest rate that other tensors of the key bear
        for group in groups:
            self._take_signs(group)
        self._loss = self._measure()

    @property
    def keys(self) -> list[str]:
        """The keys of rates whose tensors have a gradient."""
        return list(self._steps)

    def find_turns(self, keys: set[str]) -> dict[str, float]:
        """Return by key the rate where the loss turns, without keys along which it only rises."""
        turns: dict[str, float] = {}
        for key in self.keys:
            turn = self._find_turn({key: 1.0}) if key in keys else None
            if turn is not None:
                turns[key] = turn
        if len(turns) > 1:  # steps that help one by one may overshoot together
            together = self._find_turn(turns)
            turns = {key: turn * min(1.0, together or 1.0) for key, turn in turns.items()}
        return turns

    def _take_signs(self, group: dict[str, Any]) -> None:
        key = _KEYS.get(group["name"], "learning_rate")
        for parameter in group["params"]:
            gradient = parameter.grad
            parameter.grad = None
            if gradient is not None and gradient.any():
                promised = group["lr"] * gradient.abs().sum(dtype=torch.float64).item()
                self._slopes[key] = self._slopes.get(key, 0.0) + promised
                self.is_constant[key] = group["schedule"] == "constant"
                is_few = key == "value_learning_rate" and _share_of_rows(gradient) < _FEW_ROWS
                self.moves_few_rows[key] = self.moves_few_rows.get(key, False) or is_few
                step = _Step(parameter, parameter.detach().clone(), gradient.sign().to(torch.int8), group["lr"])
                self._steps.setdefault(key, []).append(step)
            elif parameter.dim() > 1 and (size := parameter.detach().float().square().mean().sqrt().item()) > 0:
                self.limits[key] = min(self.limits.get(key, math.inf), _MAX_STEP * size)

    def _find_turn(self, relative: dict[str, float]) -> float | None:
        """Return the factor of these rates at which the loss turns, or None if no step lowers it."""
        rate = _FIRST_GAIN / sum(self._slopes[key] * factor for key, factor in relative.items())
        noise = _BFLOAT16_NOISE / math.sqrt(_count_targets(self._batches)) if self._trainer.args.bf16 else 0.0
        gains: dict[float, float] = {}
        for _ in range(_MAX_RATES):
            for key, factor in relative.items():
                for step in self._steps[key]:
                    step.take(rate * factor)
            gains[rate] = self._loss - self._measure()
            if gains[rate] < max(gains.values()) - noise or math.isnan(gains[rate]):
                break
            rate *= _FACTOR
        for key in relative:
            for step in self._steps[key]:
                step.undo()
        return turning_point(gains, noise)

    def _measure(self) -> float:
        with torch.no_grad():
            losses = [self._compute_loss(batch).item() for batch in self._batches]
        return sum(losses) / len(losses)

    def _compute_loss(self, batch: Any) -> torch.Tensor:
        trainer = self._trainer
        self._bar.update()
        # Each pass has the same dropout. The Trainer's own autocast begins when it prepares the model, before the first step.
        with torch.random.fork_rng(), trainer.accelerator.autocast():
            return trainer.compute_loss(trainer.model, trainer._prepare_inputs(dict(batch)))


@dataclasses.dataclass
class _Step:
    """A step of one parameter against the signs of its gradient, at a rate relative to others."""

    parameter: nn.Parameter
    saved: torch.Tensor
    direction: torch.Tensor
    relative: float

    @torch.no_grad()
    def take(self, rate: float) -> None:
        self.parameter.copy_(torch.add(self.saved, self.direction, alpha=-rate * self.relative))

    @torch.no_grad()
    def undo(self) -> None:
        self.parameter.copy_(self.saved)


def _count_targets(batches: list[Any]) -> int:
    """Return how many tokens of batches have a loss: in a conversation only those of answers may."""
    labels = (batch.get("labels", batch["input_ids"]) for batch in batches)
    return max(1, sum(int((targets[:, 1:] != IGNORED_LABEL).sum()) for targets in labels))


def _share_of_rows(gradient: torch.Tensor) -> float:
    """Return the share of the rows of a table's gradient that are not zero."""
    rows = gradient.reshape(len(gradient), -1)
    return (rows != 0).any(1).float().mean().item()


def turning_point(gains: dict[float, float], noise: float) -> float | None:
    """Return where a parabola through zero turns, by the largest of `gains` by rate and its better neighbour.

    None if no rate gains more than the noise.
    """
    rates = sorted(rate for rate, gain in gains.items() if math.isfinite(gain))
    best = max(rates, key=gains.__getitem__, default=0.0)
    if gains.get(best, 0.0) <= noise:
        return None
    place = rates.index(best)
    neighbours = rates[max(0, place - 1) : place] + rates[place + 1 : place + 2]
    other = max(neighbours, key=gains.__getitem__, default=None)
    if other is None:
        return best
    slope, other_slope = gains[best] / best, gains[other] / other
    bend = (slope - other_slope) / (other - best)
    if bend <= 0:
        return best
    turn = (slope + bend * best) / (2 * bend)
    return min(max(turn, best / _FACTOR), best * _FACTOR)


def _batches(trainer: Any, count: int) -> Iterator[Any]:
    """Yield batches of sequences at equal distances in the training data, as the Trainer collates them."""
    sequences = trainer.train_dataset
    size = trainer.args.train_batch_size
    if isinstance(sequences, StreamedSequences):
        rows = sequences.first_rows(count * size)
    else:
        most = min(len(sequences), count * size)
        rows = [sequences[place * len(sequences) // most] for place in range(most)]
    for start in range(0, len(rows), size):
        yield trainer.data_collator(rows[start : start + size])


@contextmanager
def _restored(trainer: Any) -> Iterator[None]:
    """Compute as in training within the context, and leave no trace of it."""
    model = trainer.model
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    was_training = model.training
    model.train()
    if trainer.args.gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable(trainer.args.gradient_checkpointing_kwargs)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        model.zero_grad(set_to_none=True)
        model.train(was_training)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        trainer._divergences.clear()


def _trains_only_layers(model: nn.Module) -> bool:
    """Return whether all that trains is decoder layers that are new, without memory and adapters."""
    record = record_of(model.config)
    if record is None or any(isinstance(module, DeclaredModule) for module in model.modules()):
        return False
    layers = tuple(f"layers.{layer}." for layer in record.new_layers)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return all(any(layer in name for layer in layers) and "lora_" not in name for name in trained)


def _is_given(key: str, arguments: Any) -> bool:
    is_value = key == "value_learning_rate"
    return getattr(arguments, key) is not None or (is_value and arguments.key_value_learning_rate is not None)


def _unit_rates(arguments: Any) -> Rates:
    """Return the settings of a run with rates of 1, whose groups have the factors between tensors of one key."""
    settings = {each.name: getattr(arguments, each.name) for each in dataclasses.fields(Rates)}
    settings |= dict.fromkeys(("learning_rate", *_KEYS.values()), 1.0)
    return Rates(**settings | {"memory_learning_rate": None, "key_value_learning_rate": None})
