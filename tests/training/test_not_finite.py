"""What is not finite ends a run before it spoils anything: gradients before the step, tensors before they are saved."""

import math

import pytest
import torch
from safetensors.torch import load_file
from training.outcomes import weights
from training.tiny_run import AFTER, AtStep, PreparedRun
from transformers import AutoModelForCausalLM, TrainingArguments

from midus_hf.training.optim import cast_for_training
from midus_hf.training.trainer import MemoryTrainer, NotFiniteError, first_not_finite


def of_gradient(value):
    def spoil(model):
        parameter = next(parameter for parameter in model.parameters() if parameter.requires_grad)

        return parameter.register_hook(
            lambda gradient: gradient.flatten().index_fill(0, torch.tensor([0]), value).view_as(gradient)
        )

    return spoil


@pytest.mark.parametrize(
    ("value", "step", "changes"),
    [
        (math.inf, 4, {}),  # that saves
        (math.inf, 5, {"max_steps": 5}),  # the last
        (math.nan, 3, {"max_grad_norm": 0.0}),
        (-math.inf, 4, {"logging_steps": 5, "gradient_accumulation_steps": 2, "trainable": "all"}),
    ],
)
def test_a_gradient_that_is_not_finite_ends_the_run(value, step, changes, config_for, tmp_path):
    options = {"max_steps": 6, "save_steps": 2, "save_total_limit": None, **changes}
    run = PreparedRun(config_for(**options))
    run.trainer.add_callback(AtStep(step, of_gradient(value), "on_step_begin"))
    with pytest.raises(NotFiniteError, match=rf"norm is (inf|nan) at step {step}; .* Lower the learning rates"):
        run.execute()
    whole = [f"checkpoint-{saved}" for saved in range(2, step, 2)]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [*whole, "train_config.yaml"]
    saved = [load_file(tmp_path / "out" / name / "trained.safetensors").values() for name in whole]
    assert all(tensor.isfinite().all() for tensors in saved for tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_finite_number_is_finite(dtype):
    largest = torch.full([1000], torch.finfo(dtype).max, dtype=dtype)
    named = [("empty", torch.empty(0)), ("whole", torch.ones(3, dtype=torch.int64)), ("a", largest), ("b", -largest)]
    assert first_not_finite(named) is None and first_not_finite([]) is None
    assert first_not_finite([*named, ("c", -2 * largest)]) == "c holds inf"
    assert first_not_finite([("c", torch.tensor([math.nan, math.inf])), *named]) == "c holds nan"


Q_PROJ = "model.layers.4.self_attn.q_proj.weight"


def of_block(run, monkeypatch):
    (bank,) = run.trainer.blocks.banks
    return lambda model: bank._values(bank.touched()[0]).__setitem__(5, math.nan)


def of_weight(value, dtype=None):
    """Return what makes for a run what spoils a weight, which is saved in a dtype."""

    def spoil(run, monkeypatch):
        cast, saved = cast_for_training, {} if dtype is None else {Q_PROJ: dtype}
        monkeypatch.setattr("midus_hf.training.run.cast_for_training", lambda *given: cast(*given) | saved)
        return lambda model: model.get_parameter(Q_PROJ).data[1].fill_(value)

    return spoil


@pytest.mark.parametrize(
    ("fixture", "save_steps", "spoil", "message"),
    [
        ("config_for", 2, of_weight(math.nan), r"layers\.4\.self_attn\.q_proj\.weight holds nan at step 4"),
        ("config_for", None, of_weight(math.inf), r"layers\.4\.self_attn\.q_proj\.weight holds inf at step 4"),
        ("config_for", None, of_weight(1e6, torch.float16), r"q_proj\.weight holds inf at step 4"),  # that cannot hold it
        ("blocks_for", 2, of_block, r"block \d+ of level \d holds nan at step 4"),
    ],
    ids=["checkpoint", "model", "dtype-of-the-model", "blocks"],
)  # fmt: skip
def test_tensors_that_are_not_finite_are_never_saved(
    fixture, save_steps, spoil, message, request, monkeypatch, tmp_path
):
    run = PreparedRun(request.getfixturevalue(fixture)(max_steps=4, save_steps=save_steps))
    run.trainer.add_callback(AtStep(4, spoil(run, monkeypatch), AFTER))
    with pytest.raises(NotFiniteError, match=message):
        run.execute()
    left = [path.name for path in tmp_path.glob("out/*") if path.name != "train_config.yaml"]
    assert left == (["checkpoint-2"] if save_steps else [])


def test_what_is_frozen_may_be_what_it_is(config_for, tmp_path):
    run = PreparedRun(config_for(max_steps=1))
    run.execute()
    names = ("model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight")
    frozen, trained = map(run.model.get_parameter, names)
    frozen.data[2] = math.inf
    run.trainer.save_model(str(tmp_path / "saved"))
    assert weights(tmp_path / "saved")[names[0]][2].isinf().all()
    trained.data[2] = math.inf
    with pytest.raises(NotFiniteError):
        run.trainer.save_model(str(tmp_path / "saved"))


def test_what_a_scaler_of_gradients_leaves_out_is_left_to_it(upscaled, tmp_path):
    """It takes infinite gradients for a scale that is too large, and lowers that; a loss that is not finite ends the run."""
    model = AutoModelForCausalLM.from_pretrained(upscaled("llama"))
    trainer = MemoryTrainer(model, TrainingArguments(str(tmp_path / "out"), report_to="none", use_cpu=True))
    (parameter,) = torch.nn.Linear(1, 1, bias=False).parameters()

    def norm(loss: float = 1.0) -> float:
        parameter.grad, trainer._tr_loss = torch.full((1, 1), math.inf), torch.tensor(loss)
        return trainer.clip_gradients([parameter], 1.0).item()

    with pytest.raises(NotFiniteError, match="gradient norm is inf at step 1"):
        norm()
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    assert norm() == math.inf
    with pytest.raises(NotFiniteError, match=r"loss is nan at step 1; .* '--debug underflow_overflow'"):
        norm(math.nan)
    model.lm_head.weight.data[0, 0] = math.inf
    with pytest.raises(NotFiniteError, match=r"loss is nan, and [\w.]+ holds inf, at step 1"):
        norm(math.nan)
