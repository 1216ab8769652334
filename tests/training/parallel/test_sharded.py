"""Processes that share a batch, or parameters by FSDP2 or DeepSpeed, train as one that has all, whose model is a plain folder."""

import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from pairs import by_default
from processes.warm import MIDUS, run_ranks
from training.outcomes import assert_close_weights, logged
from training.parallel import two_processes as checks
from training.tiny_run import PreparedRun, document, refused
from transformers.integrations import deepspeed

from midus_hf.cli.train import main
from midus_hf.training.keys import Rates
from midus_hf.training.optim import parameter_groups
from midus_hf.training.prepare import load_unsharded
from midus_hf.training.run import run_training
from midus_hf.training.trainer import (
    MemoryTrainerMixin,
    _prepare_fsdp,
    check_checkpoint,
    prepare_sharing,
    save_gathered,
)

shares_parameters = MemoryTrainerMixin.shares_parameters.fget
CONFIGS = Path(__file__).parents[3] / "configs" / "accelerate"


def launched_environment(name: str) -> dict[str, str]:
    words = ["--config_file", str(CONFIGS / f"{name}.yaml"), "script.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    environment = prepare_multi_gpu_env(arguments)
    of_accelerate = {name: value for name, value in environment.items() if name.startswith(("ACCELERATE_", "FSDP_"))}
    return {name: value for name, value in of_accelerate.items() if os.environ.get(name) != value}


ENVIRONMENT = launched_environment("fsdp2")
# Accelerate shards parameters only on accelerators. What it takes CPUs for is changed where it chooses; all that follows is its own.
SHARDED = f"""
from accelerate.state import PartialState
from accelerate.utils import DistributedType

initialise = PartialState.__init__

def as_accelerators(self, *args, **kwargs):
    initialise(self, *args, **kwargs)
    if self.distributed_type is DistributedType.MULTI_CPU:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU

PartialState.__init__ = as_accelerators
{MIDUS}
"""
# Gloo's threads abort, now and then, a process that still has them at its exit: here it always fails.
FAILS_IF_THE_GROUP_IS_NOT_LEFT = f"""
import atexit, os, pathlib, torch.distributed

def fail_if_the_group_is_not_left():
    threads = [file.read_text() for file in pathlib.Path("/proc/self/task").glob("*/comm")]
    if torch.distributed.is_initialized() or any("gloo" in thread for thread in threads):
        os._exit(99)

atexit.register(fail_if_the_group_is_not_left)
{MIDUS}
"""


# Then both processes come to the same work, which they could not if one of them still waited for the other.
FAILS_IN_THE_MAIN_PROCESS = """
from types import SimpleNamespace
import torch.distributed as dist
from accelerate import PartialState
from midus_hf.training.output import in_main_process

state = PartialState(cpu=True)
run = SimpleNamespace(process_index=state.process_index)
errors = [None, None]
try:
    in_main_process(run, lambda: {}["lost"])
except Exception as error:
    dist.all_gather_object(errors, f"{type(error).__name__}: {error}")
if state.is_main_process:
    print(errors)
print(in_main_process(run, lambda: "result of the first"))
state.destroy_process_group()
"""


def test_error_of_the_main_process_reaches_the_others():
    run = run_ranks(FAILS_IN_THE_MAIN_PROCESS)
    assert run.returncode == 0, run.stderr
    assert """["KeyError: 'lost'", "MainProcessError: KeyError: 'lost'"]""" in run.stdout
    assert run.stdout.count("result of the first") == 2


def test_only_the_process_that_failed_says_why(words):
    fails = f"from midus_hf.training import output\noutput._open_here = lambda *_: {{}}['lost']\n{MIDUS}"
    run = run_ranks(fails, "train", *words)
    assert run.returncode == 1
    assert run.stderr.count("KeyError: 'lost'") == run.stderr.count("Traceback") == 1


def sharded(recipe: Path, *words: str) -> None:
    run = run_ranks(SHARDED, "train", recipe, *words, **ENVIRONMENT)
    assert run.returncode == 0, run.stderr


def test_two_processes_train_as_one(words, corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "texts")
    words += [f"--corpus={tmp_path / 'texts'}", "--max_steps=5", "--save_steps=2", "--load_best_model_at_end=true"]
    words += [f"--eval_text={corpus}", "--eval_steps=2", "--base_kl=3"]
    one, shared = tmp_path / "out", tmp_path / "shared"
    more = ["--per_device_train_batch_size=1", f"--output_dir={shared}"]
    run = run_ranks(FAILS_IF_THE_GROUP_IS_NOT_LEFT, "train", *words, *more, COLUMNS="120")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("Training new: ") == run.stdout.count(": 5 steps, 160 tokens") == 1
    assert run.stdout.count("'eval_perplexity': ") == 3
    assert main(words) == 0
    for name, count in (("loss", 5), ("base_divergence", 5), ("eval_loss", 3)):
        assert logged(shared, name) == pytest.approx(logged(one, name), rel=1e-5)
        assert len(logged(one, name)) == count
    folders = [sorted(path.name for path in folder.iterdir()) for folder in (shared, one)]
    assert folders[0] == folders[1]
    assert {"checkpoint-4", "checkpoint-5"} <= set(folders[0])
    assert_close_weights(one, shared)
    (tmp_path / "texts" / "003.txt").write_text(document(60, 77))
    run = run_ranks(MIDUS, "train", *words, *more, "--resume_from_checkpoint=true", COLUMNS="120")
    assert run.returncode == 2
    assert run.stderr.count("whose sequences of tokens are not those") == 1


@pytest.mark.parametrize("method", by_default(["midus-hml"], checks.METHODS))
def test_sharded_processes_train_as_one(method, corpus, tmp_path):
    def shared(*words: str) -> None:
        sharded(*words, "--activation_checkpointing=true")

    options = {"bf16": True, "tolerance": 3e-3} if method == "llama-pro" else {}
    checks.assert_shared_run_is_that_of_one(method, shared, corpus, tmp_path, **options)


@pytest.mark.product
@pytest.mark.parametrize("law", ["tied_tensors_are_saved_once", "shared_run_goes_on_exactly"])
def test_sharded_processes_save_once_and_go_on_exactly(law, corpus, tmp_path):
    getattr(checks, f"assert_{law}")(sharded, corpus, tmp_path)


@pytest.fixture
def told_to_shard(monkeypatch):
    for variable, value in ENVIRONMENT.items():
        monkeypatch.setenv(variable, value)


def test_a_run_that_does_not_shard_as_it_should_is_refused(words, told_to_shard, tmp_path, capsys):
    assert main(words) == 2
    assert "accelerate was started with FSDP, which does not shard on cpu" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_first_kind_of_fsdp_is_refused():
    with refused("fsdp_version is 1, .* expected 2"):
        _prepare_fsdp(FullyShardedDataParallelPlugin(fsdp_version=1), torch.nn.Linear(2, 2))


def test_sharded_model_is_saved_whole_and_uploaded(config_for, tmp_path, monkeypatch):
    trainer, plugin, there = PreparedRun(config_for()).trainer, SimpleNamespace(), []
    monkeypatch.setattr(trainer, "is_fsdp_enabled", True)
    monkeypatch.setattr(trainer.accelerator.state, "fsdp_plugin", plugin, raising=False)
    for kind, is_there in (("FULL_STATE_DICT", True), ("SHARDED_STATE_DICT", False)):
        plugin.state_dict_type = kind
        trainer.save_model(str(tmp_path / kind), _internal_call=True)
        assert (tmp_path / kind / "model.safetensors").exists() == is_there
    monkeypatch.setattr(trainer.args, "push_to_hub", True)
    saved = tmp_path / "saved" / "model.safetensors"
    monkeypatch.setattr(trainer, "push_to_hub", lambda **keys: there.append((saved.exists(), keys["commit_message"])))
    trainer.save_model(str(saved.parent))
    assert there == [(True, "Model save")]


def test_configs_of_accelerate_are_read_as_they_are_meant(told_to_shard):
    assert "ACCELERATE_USE_FSDP" not in launched_environment("ddp")
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert (plugin.state_dict_type.name, plugin.transformer_cls_names_to_wrap) == ("SHARDED_STATE_DICT", None)


def sharding(model=None, half: bool = False, **settings) -> SimpleNamespace:
    """Return what a Trainer is, as far as the mixin asks, where accelerate was told to use DeepSpeed."""
    state = SimpleNamespace(deepspeed_plugin=Mock(deepspeed_config=settings))
    arguments = SimpleNamespace(bf16=half, world_size=2, process_index=1)
    trainer = SimpleNamespace(args=arguments, accelerator=SimpleNamespace(state=state), is_fsdp_enabled=False)
    trainer.model, trainer.is_deepspeed_enabled = torch.nn.Linear(2, 2) if model is None else model, True
    prepare_sharing(trainer)
    return trainer


SAVED = {
    "model.safetensors": "hold whole models",
    "pytorch_model_fsdp_0/0": "share parameters by FSDP",
    "global_step3/mp_rank_00_model_states.pt": "share moments by DeepSpeed",
    "global_step3/zero_pp_rank_1_mp_rank_00_model_states.pt": "share parameters by DeepSpeed",
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("file", SAVED)
def test_checkpoint_of_other_sharding_is_not_resumed(tmp_path, file, stage):
    """A Trainer without it would find no moments in its checkpoint, and go on without a word."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    for name in (file, "optimizer.pt", "scheduler.pt"):
        (tmp_path / name).write_text("")
    trainer = sharding(zero_optimization={"stage": stage})
    here = "share parameters by DeepSpeed" if stage == 3 else "share moments by DeepSpeed"
    if SAVED[file] == here:
        check_checkpoint(trainer, tmp_path)
        trainer.is_deepspeed_enabled, here = False, "hold whole models"
    with refused(f"was saved by processes that {SAVED[file]}, and these {here}; resume it"):
        check_checkpoint(trainer, tmp_path)
    trainer.is_deepspeed_enabled, trainer.is_fsdp_enabled = False, True
    by_fsdp = refused(f"{SAVED[file]}, and these share parameters by FSDP; resume it")
    with nullcontext() if "FSDP" in SAVED[file] else by_fsdp:
        check_checkpoint(trainer, tmp_path)


def test_zero3_save_gathers_once_and_keeps_ties(tmp_path):
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}
    model = torch.nn.ModuleDict({"embed": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 2)})
    model["head"].weight = model["embed"].weight
    trainer = sharding(model, zero_optimization=zero)
    assert zero["stage3_gather_16bit_weights_on_model_save"] is True
    trainer.saved_dtypes = {"embed.weight": torch.bfloat16}
    trainer.deepspeed, saved = object(), []
    (tmp_path / "config.json").write_text('{"dtype": "float32", "vocab_size": 8}')
    arguments = {name: torch.ones(2) for name in ("embed.weight", "embed.bias", "head.weight", "head.bias")}
    trainer.args.push_to_hub, trainer.args.should_save = False, True
    trainer._save = lambda folder, state: saved.append({name: tensor.dtype for name, tensor in state.items()})
    for process in (arguments, None):  # as DeepSpeed tells the first and the others
        trainer.accelerator.get_state_dict = lambda model, state=process: state if model is trainer.deepspeed else {}
        save_gathered(trainer, str(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text()) == {"dtype": "bfloat16", "vocab_size": 8}
    of_first = {"embed.weight": torch.bfloat16, "embed.bias": torch.float32, "head.bias": torch.float32}
    assert saved == [of_first, {}]


@pytest.mark.parametrize(("stage", "shared"), [(0, False), (1, False), (2, False), (3, True)])
def test_parameters_are_shared_from_the_third_stage_on(stage, shared):
    zero = {"stage": stage}
    trainer = sharding(zero_optimization=zero)
    assert not shares_parameters(trainer)  # before DeepSpeed has the model
    trainer.deepspeed = object()
    assert shares_parameters(trainer) is shared
    assert zero.get("stage3_gather_16bit_weights_on_model_save", False) is shared
    trainer.is_deepspeed_enabled = False
    assert not shares_parameters(trainer)
    trainer.is_fsdp_enabled = True
    assert shares_parameters(trainer)


@pytest.fixture
def zero_three():
    plugin = Mock(is_zero3=lambda: True)  # which can be referred to weakly
    deepspeed.set_hf_deepspeed_config(plugin)
    yield plugin
    deepspeed.unset_hf_deepspeed_config()


def test_load_unsharded_restores_deepspeed_config(zero_three):
    with pytest.raises(ZeroDivisionError), load_unsharded():
        assert not deepspeed.is_deepspeed_zero3_enabled()
        raise ZeroDivisionError
    assert deepspeed.is_deepspeed_zero3_enabled()


def test_adapters_are_refused_where_weights_are_cut(words, config_for, zero_three):
    with refused("DeepSpeed's ZeRO-3 shards; expected processes that hold whole models.*ddp.yaml"):
        run_training(config_for(adapters={"r": 2}))


def test_a_matrix_that_was_cut_decays_as_a_matrix():
    matrix, norm = (torch.nn.Parameter(torch.empty(0)) for _ in range(2))
    matrix.ds_shape, norm.ds_shape = torch.Size([4, 2]), torch.Size([4])
    model = torch.nn.ParameterList([matrix, norm])
    groups = {group["name"]: group["params"] for group in parameter_groups(model, Rates(learning_rate=1e-3))}
    assert groups["decay"][0] is matrix
    assert groups["no_decay"][0] is norm


ROUNDED = r"casts a whole model to {0}: 0\.weight, .* would be rounded; expected fp32, or a model in {0}\. Start it"
REFUSED_BY_DEEPSPEED = [
    *((False, {name: {"type": "AdamW"}}, f"has a section '{name}', which would replace") for name in ("optimizer", "scheduler")),
    (True, {}, "bf16 is set, and .*" + ROUNDED.format("bfloat16")),
    # accelerate leaves what the file says as it is.
    *((False, {key: {"enabled": True}}, f"file of DeepSpeed sets {dtype}, .*" + ROUNDED.format(dtype))
      for key, dtype in (("bf16", "bfloat16"), ("fp16", "float16"))),
]  # fmt: skip


@pytest.mark.parametrize(("half", "settings", "message"), REFUSED_BY_DEEPSPEED)
def test_deepspeed_rates_and_rounding_are_refused(half, settings, message):
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2).requires_grad_(False), torch.nn.Linear(2, 2)])
    with refused(message):
        sharding(model, half=half, **settings)
    sharding(model, bf16={"enabled": False}, fp16={"enabled": False})
    sharding(torch.nn.ModuleList([model[0].to(torch.bfloat16), model[1]]), half=True)
