"""A run trains what it should, leaves the rest as it was, and can be resumed exactly."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from pairs import by_default
from safetensors.torch import load_file
from tiny import FAMILIES
from training.tiny_run import NEW_LAYERS, save_upscaled, tiny_config
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from midus_hf.training.run.train import prepare, train
from midus_hf.training.run.training_log import read_log

EXACT = ("loss", "grad_norm", "learning_rate", "num_input_tokens_seen", "epoch", "step")


def exact_log(output: Path) -> list[dict]:
    """What a log says about the computation, without how long it took."""
    return [{key: event[key] for key in EXACT} for event in read_log(output / "log.jsonl") if "loss" in event]


class Interrupt(TrainerCallback):
    """Stop as a person would, after a step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def interrupted(config, step: int) -> None:
    run = prepare(config)
    run.trainer.add_callback(Interrupt(step))
    with pytest.raises(KeyboardInterrupt):
        run.execute()


def as_it_was_at(checkpoint: int, whole: Path, output: Path) -> None:
    """Copy a run as one that was killed behind this checkpoint."""
    shutil.copytree(whole, output, ignore=shutil.ignore_patterns("config.json", "model.safetensors"))
    shutil.copytree(whole / f"checkpoint-{checkpoint}", output / f"checkpoint-{checkpoint}", dirs_exist_ok=True)
    for folder in output.glob("checkpoint-*"):
        if int(folder.name.rpartition("-")[2]) > checkpoint:
            shutil.rmtree(folder)


def assert_same(parts: Path, whole: Path) -> None:
    """Of two runs, what they logged and the weights they ended with, bit by bit."""
    assert exact_log(parts) == exact_log(whole)
    of_whole, of_parts = (load_file(folder / "model.safetensors") for folder in (whole, parts))
    assert of_whole.keys() == of_parts.keys()
    assert all(torch.equal(of_whole[name], of_parts[name]) for name in of_whole)


def is_new(name: str) -> bool:
    return any(name.startswith(f"model.layers.{layer}.") for layer in NEW_LAYERS)


def test_base_tensors_keep_their_bytes_and_every_new_tensor_moves(family, upscaled, corpus, tmp_path):
    before = load_file(upscaled(family) / "model.safetensors")
    result = train(tiny_config(upscaled(family), corpus, tmp_path / "out", max_steps=6))
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert result.steps == 6 and result.tokens == 6 * 2 * 16
    assert before.keys() == after.keys() and any(map(is_new, before))
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor) != is_new(name), name


@pytest.mark.parametrize("family", by_default(["llama", "gemma3"], FAMILIES))
def test_a_resumed_run_reproduces_the_losses_and_the_weights_of_the_uninterrupted_one(
    family, upscaled, corpus, tmp_path
):
    options = {"save_every": 4, "gradient_accumulation": 2, "max_grad_norm": 0.01, "max_steps": 8}
    train(tiny_config(upscaled(family), corpus, tmp_path / "whole", **options))
    interrupted(tiny_config(upscaled(family), corpus, tmp_path / "parts", **options), step=6)
    assert [event["step"] for event in exact_log(tmp_path / "parts")] == list(range(1, 6))
    result = train(tiny_config(upscaled(family), corpus, tmp_path / "parts", resume=True, **options))
    assert [event["step"] for event in exact_log(tmp_path / "whole")] == list(range(1, 9))
    assert result.steps == 8 and result.tokens == 8 * 2 * 2 * 16
    assert_same(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize(
    "changes",
    [
        {"corpus_options": {"streaming": True}},
        {"precision": "bf16"},
        {"max_steps": None, "epochs": 2, "batch_size": 20},
        {"log_every": 3},
        {"trainable": "all", "document_mask": True},
    ],
    ids=["streaming", "bf16", "epochs", "sparse_log", "all"],
)
def test_every_kind_of_run_resumes_exactly(changes, upscaled, corpus, tmp_path):
    options = {"save_every": 4, "keep_checkpoints": None, "max_steps": 7, **changes}
    train(tiny_config(upscaled("llama"), corpus, tmp_path / "whole", **options))
    as_it_was_at(4, tmp_path / "whole", tmp_path / "parts")
    train(tiny_config(upscaled("llama"), corpus, tmp_path / "parts", resume=True, **options))
    assert exact_log(tmp_path / "whole")[-1]["step"] > 4
    assert_same(tmp_path / "parts", tmp_path / "whole")


def test_a_stream_resumes_exactly_beyond_its_first_pass(upscaled, corpus, tmp_path):
    options = {"save_every": 5, "batch_size": 20, "max_steps": 7, "corpus_options": {"streaming": True}}
    assert 5 * 20 > 1220 // 16, "the checkpoint must lie in the second pass"
    train(tiny_config(upscaled("llama"), corpus, tmp_path / "whole", **options))
    as_it_was_at(5, tmp_path / "whole", tmp_path / "parts")
    train(tiny_config(upscaled("llama"), corpus, tmp_path / "parts", resume=True, **options))
    assert_same(tmp_path / "parts", tmp_path / "whole")


def test_keys_and_values_keep_their_rate_while_the_rest_warms_up_and_falls_to_zero(upscaled, corpus, tmp_path):
    rates: dict[str, list[float]] = {}

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, optimizer, **kwargs):
            for group in optimizer.param_groups:
                rates.setdefault(group["name"], []).append(group["lr"])

    run = prepare(
        tiny_config(
            upscaled("llama"), corpus, tmp_path / "out", key_value_learning_rate=3e-3, value_learning_rate=3e-2
        )
    )
    run.trainer.add_callback(Watch())
    run.execute()
    assert rates["keys"] == [3e-3] * 20 and rates["values"] == [3e-2] * 20
    assert rates["decay"] == rates["no_decay"]
    assert rates["decay"][:3] == [0, 5e-3, 1e-2] and max(rates["decay"]) == 1e-2
    assert all(later < earlier for earlier, later in zip(rates["decay"][2:], rates["decay"][3:], strict=False))
    assert run.trainer.lr_scheduler.get_last_lr() == [0, 0, 3e-3, 3e-2]
    events = [event for event in read_log(tmp_path / "out" / "log.jsonl") if "loss" in event]
    assert [event["learning_rate"] for event in events] == rates["decay"]
    assert {event["learning_rate_keys"] for event in events} == {3e-3}
    assert {event["learning_rate_values"] for event in events} == {3e-2}


def test_the_first_loss_is_that_of_the_model_on_the_first_batch(family, upscaled, corpus, tmp_path):
    run = prepare(tiny_config(upscaled(family), corpus, tmp_path / "out", max_steps=1))
    batch = next(iter(run.trainer.get_train_dataloader()))
    logits = AutoModelForCausalLM.from_pretrained(upscaled(family)).train()(input_ids=batch["input_ids"]).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
    assert run.execute().loss == pytest.approx(expected.item(), rel=1e-6)


def test_training_everything_learns_the_text(upscaled, corpus, tmp_path):
    config = tiny_config(upscaled("llama"), corpus, tmp_path / "out", trainable="all", max_steps=40, batch_size=8)
    train(config)
    losses = [event["loss"] for event in exact_log(tmp_path / "out")]
    assert losses[-1] < losses[0] - 0.5


def test_the_trained_folder_is_a_model_like_the_one_it_came_from(family, upscaled, corpus, tmp_path):
    train(tiny_config(upscaled(family), corpus, tmp_path / "out", max_steps=2))
    source, trained = upscaled(family), tmp_path / "out"
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, trained))
    assert after == before
    assert (trained / "upscale.json").read_bytes() == (source / "upscale.json").read_bytes()
    assert AutoTokenizer.from_pretrained(trained)("w5 w6")["input_ids"] == [5, 6]
    assert AutoModelForCausalLM.from_pretrained(trained).config.upscale["new_layers"] == NEW_LAYERS
    assert not [path.name for path in trained.iterdir() if path.suffix in (".bin", ".pt", ".pth") or path.is_dir()]


def test_checkpoints_are_models_with_a_tokenizer_and_only_the_latest_are_kept(upscaled, corpus, tmp_path):
    train(tiny_config(upscaled("llama"), corpus, tmp_path / "out", save_every=4, max_steps=12))
    checkpoints = sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*"))
    assert checkpoints == ["checkpoint-12", "checkpoint-8"]
    folder = tmp_path / "out" / "checkpoint-8"
    assert AutoTokenizer.from_pretrained(folder)("w5")["input_ids"] == [5]
    assert AutoModelForCausalLM.from_pretrained(folder).config.upscale["new_layers"] == NEW_LAYERS


@pytest.mark.parametrize("family", by_default(["qwen2", "gemma2"], FAMILIES))
def test_in_bf16_a_half_precision_base_keeps_its_bytes_and_new_tensors_move(family, corpus, tmp_path):
    model = save_upscaled(family, tmp_path, dtype=torch.bfloat16)
    run = prepare(tiny_config(model, corpus, tmp_path / "out", precision="bf16", max_steps=6))
    held = {name: parameter.dtype for name, parameter in run.model.named_parameters()}
    assert {held[name] for name in held if is_new(name)} == {torch.float32}
    assert {held[name] for name in held if not is_new(name)} == {torch.bfloat16}
    run.execute()
    before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor) != is_new(name), name


def test_fp32_computes_in_float32_whatever_the_checkpoint_holds(corpus, tmp_path):
    model = save_upscaled("llama", tmp_path, dtype=torch.bfloat16)
    run = prepare(tiny_config(model, corpus, tmp_path / "out", max_steps=4))
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}
    run.execute()
    before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert all(after[name].dtype == torch.bfloat16 for name in after)
    assert all(torch.equal(after[name], before[name]) for name in before if not is_new(name))


@pytest.mark.parametrize("family", by_default(["qwen3", "gemma2"], FAMILIES))
def test_activation_checkpointing_changes_no_loss(family, upscaled, corpus, tmp_path):
    for checkpointing in (False, True):
        output = tmp_path / str(checkpointing)
        train(tiny_config(upscaled(family), corpus, output, max_steps=4, activation_checkpointing=checkpointing))
    assert exact_log(tmp_path / "True") == exact_log(tmp_path / "False")


def test_tensorboard_gets_the_log_if_asked(upscaled, corpus, tmp_path):
    pytest.importorskip("tensorboard")
    train(tiny_config(upscaled("llama"), corpus, tmp_path / "out", max_steps=2, report_to="tensorboard"))
    assert list((tmp_path / "out").rglob("events.out.tfevents.*"))


def test_a_loss_that_is_not_finite_stops_the_run(upscaled, corpus, tmp_path):
    run = prepare(tiny_config(upscaled("llama"), corpus, tmp_path / "out", save_every=1))
    with torch.no_grad():
        run.model.model.layers[1].input_layernorm.weight.fill_(float("nan"))
    with pytest.raises(
        FloatingPointError, match=r"loss is nan at step 1; expected a finite number. Lower the learning"
    ):
        run.execute()
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    assert not (tmp_path / "out" / "config.json").exists()
