"""A run without a rate measures one, records the number that it used, and leaves no trace of having measured."""

import copy
import math
import shutil

import pytest
import torch
import yaml
from training.outcomes import weights
from training.tiny_run import PreparedRun, refused, save_upscaled
from transformers import AutoModelForCausalLM

from midus_hf.training.keys import Rates
from midus_hf.training.optim import parameter_groups, zero_gains
from midus_hf.training.rates import FoundRates, find_rates, turning_point
from midus_hf.training.run import run_training


def unmeasured_trainer(arguments):
    """The trainer of a run, before it has measured a rate."""
    trainer = PreparedRun(arguments).trainer
    for key in ("learning_rate", "value_learning_rate", "gain_learning_rate"):
        setattr(trainer.args, key, None)
    return trainer


def recorded(output):
    return yaml.safe_load((output / "train_config.yaml").read_text())


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ({rate: 8 * rate - 4 * rate * rate for rate in (0.1, 0.3, 0.9, 2.7)}, 1.0),  # a parabola turns where it turns
        ({0.1: 0.1, 0.3: -9.0}, 16.5 / 310),  # falls too steeply for a parabola whose turn is far from the best
        ({0.1: 0.1, 0.3: 0.3}, 0.3),  # still rises in proportion
        ({0.1: 0.2, 0.3: math.nan}, 0.1),
        ({0.1: -0.2, 0.3: -3.0}, None),
        ({}, None),
    ],
)
def test_turning_point_is_where_the_parabola_turns(gains, expected):
    found = turning_point(gains, noise=0.0)
    assert found == (None if expected is None else pytest.approx(expected, rel=1e-6))


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ((0.003, -0.001, 0.002, 0.1, 0.3, 0.2), 0.3),  # the first are rounding, and so is their fall
        ((0.003, -0.001, 0.002, -0.1), None),
    ],
)
def test_rounding_of_bfloat16_is_no_turn(gains, expected, config_for, monkeypatch):
    """In bfloat16 a small step changes the loss by less than rounding does."""
    trainer = unmeasured_trainer(config_for(bf16=True))
    losses = iter([5.0, *(5.0 - gain for gain in gains)])
    monkeypatch.setattr("midus_hf.training.rates._LineSearch._measure", lambda _: next(losses))
    found = {}

    def turning_point_of(gains, noise):
        found.update(gains)
        return turning_point(gains, noise)

    monkeypatch.setattr("midus_hf.training.rates.turning_point", turning_point_of)
    turns = find_rates(trainer, trains_new=True).turns
    assert len(found) == len(gains)
    best = max(found, key=found.__getitem__)
    assert (found[best], bool(turns)) == (pytest.approx(max(gains)), expected is not None)
    if expected is not None:
        assert best / 4 < turns["value_learning_rate"] < best * 4


def test_rounding_counts_only_tokens_that_are_learned(config_for, monkeypatch):
    found = []
    monkeypatch.setattr("midus_hf.training.rates.turning_point", lambda gains, noise: found.append(noise))

    def noise(is_learned):
        trainer = unmeasured_trainer(config_for(bf16=True))
        collate = trainer.data_collator

        def masked(rows):
            batch = collate(rows)
            places = torch.arange(batch["input_ids"].shape[1])
            return {**batch, "labels": batch["input_ids"].masked_fill(~is_learned(places), -100)}

        trainer.data_collator = masked
        find_rates(trainer, trains_new=True)
        return found.pop()

    # Nothing is learned at the first place of a sequence.
    assert noise(lambda place: place == 1) == pytest.approx(2 * noise(lambda place: place < 5))


@pytest.mark.parametrize("method", ["midus-hml", "engram", "moc", "ultramem-v2", "llama-pro"])
def test_rates_of_a_bfloat16_model_are_measured_as_it_trains(method, config_for, upscaled, tmp_path):
    model = shutil.copytree(upscaled("llama", method), tmp_path / "bfloat16")
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(model)
    seen = []
    trainer = unmeasured_trainer(config_for(model=model, bf16=True))
    trainer.model.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    find_rates(trainer, trains_new=True)
    assert seen
    assert all(seen)


def test_first_step_at_the_turn_helps_more_than_others(config_for):
    # All texts are one batch, which the gradient and the loss are both computed of.
    trainer = unmeasured_trainer(config_for(model=None, trainable="all", per_device_train_batch_size=100))
    turns = find_rates(trainer, trains_new=False).turns
    batch = trainer.data_collator(list(trainer.train_dataset))
    trainer.compute_loss(trainer.model, dict(batch)).backward()
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    losses = {}
    for factor in (0.05, 1.0, 20.0):
        for name, parameter in trainer.model.named_parameters():
            key = "value_learning_rate" if name.endswith("value_bank") else "learning_rate"
            parameter.data = before[name] - factor * turns[key] * torch.sign(parameter.grad)
        with torch.no_grad():
            losses[factor] = trainer.compute_loss(trainer.model, dict(batch)).item()
    assert min(losses, key=losses.__getitem__) == 1.0


@pytest.mark.parametrize("method", ["midus-hml", "midus-pkm", "moc", "ultramem-v2", "llama-pro"])
@pytest.mark.parametrize("streaming", [False, True])
def test_measuring_leaves_everything_as_it_was(method, streaming, config_for, upscaled):
    model = upscaled("llama", method)
    trainer = unmeasured_trainer(config_for(model=model, streaming=streaming, shuffle_buffer=4))
    state = torch.get_rng_state()
    before = copy.deepcopy(trainer.model.state_dict())
    buffers = {name: buffer.clone() for name, buffer in trainer.model.named_buffers()}
    find_rates(trainer, trains_new=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    after = trainer.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in trainer.model.named_buffers())


@pytest.mark.parametrize("streaming", [False, True])
def test_measured_run_equals_one_that_is_given_its_rates(streaming, config_for, tmp_path):
    keys = {"streaming": streaming, "max_steps": 4}
    run_training(config_for("measured", learning_rate=None, **keys))
    record = recorded(tmp_path / "measured")
    rates = {key: rate for key, rate in record.items() if key.endswith("learning_rate")}
    assert set(rates) == {"learning_rate", "value_learning_rate"}
    assert all(isinstance(rate, float) for rate in rates.values())
    run_training(config_for("given", **keys, **rates))
    measured, given = weights(tmp_path / "measured"), weights(tmp_path / "given")
    assert all(torch.equal(measured[name], given[name]) for name in given)


def test_resumed_run_keeps_the_measured_rates(config_for, tmp_path, monkeypatch):
    keys = {"learning_rate": None, "max_steps": 6, "save_steps": 3, "save_total_limit": None}
    run_training(config_for(**keys))
    record = recorded(tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "checkpoint-6")
    monkeypatch.setattr("midus_hf.training.run.find_rates", lambda *_: pytest.fail("measured again"))
    run_training(config_for(**keys, resume_from_checkpoint=True))
    for key in ("learning_rate", "value_learning_rate"):
        assert recorded(tmp_path / "out")[key] == record[key]


def test_rates_that_are_given_are_taken_as_given(config_for, tmp_path, capsys):
    run_training(config_for(learning_rate=None, value_learning_rate=0.125, max_steps=2))
    record = recorded(tmp_path / "out")
    assert record["value_learning_rate"] == 0.125
    assert record["learning_rate"] == 1e-3  # nothing but values has a gradient before the first step
    assert "learning_rate 0.001: the usual ones, since" in capsys.readouterr().out


def test_new_gains_learn_at_the_scale_of_the_gains_next_to_them(tmp_path):
    model = save_upscaled("gemma3", tmp_path, "llama-pro")
    loaded = AutoModelForCausalLM.from_pretrained(model)
    scales = zero_gains(loaded)
    assert len(scales) == 4  # two norms after the projections of two layers
    layers = loaded.model.layers
    for name, scale in scales.items():
        index, norm = int(name.split(".")[2]), name.split(".")[3]
        assert loaded.config.upscale["plan"][index]["sources"] == [loaded.config.upscale["plan"][index - 1]["base"]]
        gains = 1 + getattr(layers[index - 1], norm).weight.detach()
        assert scale == pytest.approx(gains.square().mean().sqrt().item(), rel=1e-3)
        assert torch.all(1 + loaded.get_parameter(name) == 0)
    loaded.requires_grad_(True)
    groups = parameter_groups(loaded, Rates(1e-3, gain_learning_rate=1e-2))
    of_gains = [group for group in groups if group["name"] == "gains"]
    assert [group["lr"] for group in of_gains] == [1e-2 * scale for scale in scales.values()]
    assert not [group for group in parameter_groups(loaded, Rates(1e-3)) if group["name"] == "gains"]


def test_gains_of_new_layers_are_measured(tmp_path, config_for, monkeypatch):
    monkeypatch.setattr("midus_hf.training.rates.turning_point", lambda *_: 0.1)
    trainer = unmeasured_trainer(config_for(model=save_upscaled("gemma3", tmp_path / "m", "llama-pro")))
    found = find_rates(trainer, trains_new=True)
    assert set(found.turns) == {"gain_learning_rate"}
    assert found.rates == {"learning_rate": 1e-3, "gain_learning_rate": 0.1}


@pytest.mark.parametrize(
    ("method", "keys", "expected"),
    [
        ("llama-pro", {}, 0.1),
        ("llama-pro", {"adapters": {"r": 4}}, 0.055),
        ("llama-pro", {"trainable": "all"}, 0.055),
        ("moc", {}, 0.055),
    ],
)
def test_only_new_layers_get_all_of_the_turn(method, keys, expected, tmp_path, config_for, monkeypatch):
    monkeypatch.setattr("midus_hf.training.rates.turning_point", lambda *_: 0.1)
    monkeypatch.setattr("midus_hf.training.rates._MAX_STEP", math.inf)
    trainer = unmeasured_trainer(config_for(model=save_upscaled("llama", tmp_path / "m", method), **keys))
    assert find_rates(trainer, trains_new="trainable" not in keys).rates["learning_rate"] == expected


@pytest.mark.parametrize(("rows", "expected"), [(16, 0.028), (4096, 0.014)])
def test_tables_of_which_a_step_moves_few_rows_get_half(rows, expected, tmp_path, config_for, monkeypatch):
    monkeypatch.setattr("midus_hf.training.rates.turning_point", lambda *_: 0.1)
    model = save_upscaled("llama", tmp_path / "m", "engram", {"rows": rows})
    trainer = unmeasured_trainer(config_for(model=model))
    assert find_rates(trainer, trains_new=True).rates["value_learning_rate"] == expected


def test_missing_rate_is_refused(config_for):
    trainer = unmeasured_trainer(config_for())
    with refused("learning_rate is None"):
        trainer.create_optimizer()


def test_found_rates_say_why():
    found = FoundRates({"learning_rate": 0.001}, {"learning_rate": 0.0018})
    assert str(found) == (
        "learning_rate 0.001: a first step helps these texts most at learning_rate 0.0018, and a run gets a part of it"
    )
    assert str(FoundRates({"learning_rate": 0.0018}, {"learning_rate": 0.00182})).endswith("and a run gets it")


@pytest.mark.parametrize(("key", "value"), [("value_learning_rate", 0.5), ("eval_share", 0.2)])
def test_changed_rate_or_share_is_not_resumed_over(key, value, config_for, tmp_path):
    keys = {"learning_rate": None, "max_steps": 4, "save_steps": 2, "save_total_limit": None}
    run_training(config_for(**keys))
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    with refused(f"{key} is {value}"):
        run_training(config_for(**keys, **{key: value}, resume_from_checkpoint=True))
