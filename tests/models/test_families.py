"""Classes of families are made from rows; what other libraries decide by their names."""

import ast
import copy
import inspect
import pickle
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from composite import composite_model
from models.fresh_process import run_python
from models.hosting import host_of
from models.upscaled import upscaled_model
from tiny import prompt, tiny_model
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from midus_hf.anatomy.types import MAIN_TYPES, model_type_of
from midus_hf.models import FAMILIES
from midus_hf.models.families import template
from midus_hf.models.families.template import family_source, host_type
from midus_hf.version import NEWEST_TRIED_TRANSFORMERS
from scripts.anatomy.tiny import tiny_model as type_model
from upscalers.runs.upscale import upscale


@pytest.mark.parametrize("model_type", MAIN_TYPES)
def test_module_of_a_family_has_a_source_and_a_place(model_type):
    family = FAMILIES[model_type]
    module = sys.modules[family.__module__]
    hosts = [each for each in vars(module).values() if getattr(each, "__module__", None) == module.__name__]
    assert family in hosts
    assert family.config_class in hosts
    for each in hosts:
        path = Path(inspect.getfile(each))
        assert path.name == f"{model_type}.py"
        assert inspect.getsource(each) in path.read_text()
    source = family_source(model_type_of(model_type))
    assert inspect.getsource(module) == Path(module.__file__).read_text() == source


def test_source_of_a_family_is_renewed_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    paths = [Path(template._write_source("llama", source)) for source in ("a = 1\n", "a = 2\n")]
    assert [path.read_text() for path in paths] == ["a = 1\n", "a = 2\n"]
    assert len({*paths}) == 2
    paths[0].write_text("a")
    assert template._write_source("llama", "a = 1\n") == str(paths[0])
    assert paths[0].read_text() == "a = 1\n"
    assert all(path.is_relative_to(tmp_path / "midus_hf" / "families") for path in paths)


def test_unwritable_cache_leaves_the_source_in_memory(tmp_path):
    (tmp_path / "file").write_text("")
    code = """
import inspect, os
os.environ["XDG_CACHE_HOME"] = "file"
from midus_hf.models import FAMILIES
print(inspect.getsource(FAMILIES["llama"]).splitlines()[1])
"""
    assert run_python(code, tmp_path, package_present=True).startswith("class MidusLlamaForCausalLM(")


@pytest.mark.parametrize(("model_type", "network"), [("cohere", "mlp"), ("lfm2", "feed_forward"), ("mixtral", "mlp")])
def test_parts_of_other_names_and_orders_are_read(model_type, network):
    source = family_source(model_type_of(model_type))
    compile(source, model_type, "exec")
    assert ("feed_forward_name" in source) == (network != "mlp")
    assert ("adds_mixer = False" in source) == (model_type == "cohere")


def test_fresh_process_builds_no_model_and_makes_named_types(tmp_path):
    config = FAMILIES["llama"].config_class(num_hidden_layers=1)
    (tmp_path / "config.pkl").write_bytes(pickle.dumps(config))
    code = """
import pickle
from torch import nn
built, init = [], nn.Module.__init__
nn.Module.__init__ = lambda self, *args, **kwargs: (built.append(type(self).__name__), init(self, *args, **kwargs))[1]
print(pickle.load(open("config.pkl", "rb")).model_type)
import midus_hf.models.families as families
from transformers import AutoConfig
print([name for name in built if name != "Module"], len(families.FAMILIES))
print("olmo" in families.FAMILIES, AutoConfig.for_model("midus_olmo", num_hidden_layers=2).model_type, "olmo" in families.FAMILIES)
"""
    printed = run_python(code, tmp_path, package_present=True)
    assert printed == f"{config.model_type}\n[] {len(MAIN_TYPES)}\nFalse midus_olmo True\n"


def test_newer_transformers_than_was_tried_is_told_once(tmp_path):
    major, minor = NEWEST_TRIED_TRANSFORMERS.split(".")
    tried, newer = ["5.23.9", f"{NEWEST_TRIED_TRANSFORMERS}.7"], f"{major}.{int(minor) + 1}.0"
    newer = [newer, f"{newer}.dev0", "6.0"]
    code = f"""
import importlib, sys, warnings, transformers
for transformers.__version__ in {tried + newer!r}:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if "midus_hf.models" in sys.modules:
            importlib.reload(sys.modules["midus_hf.models"])
        import midus_hf.models
        from midus_hf import models
    print([str(each.message) for each in caught if "was tried with" in str(each.message)])
"""
    reports = [ast.literal_eval(line) for line in run_python(code, tmp_path, package_present=True).splitlines()]
    assert [len(report) for report in reports] == [0] * len(tried) + [1] * len(newer)
    for version, (line,) in zip(newer, reports[len(tried) :], strict=True):
        assert f"up to {NEWEST_TRIED_TRANSFORMERS}, and {version} is installed" in line


_SMOOTHED = """
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

def smoothed(model, folder):
    arguments = TrainingArguments(folder, label_smoothing_factor=0.1, use_cpu=True, report_to=[], disable_tqdm=True)
    tokens = torch.arange(3, 27).view(2, 12)
    loss = Trainer(model.eval(), arguments).compute_loss(model, {"input_ids": tokens, "labels": tokens.clone()})
    with torch.no_grad():
        logp = model(tokens).logits[:, :-1].log_softmax(-1)
    expected = -(0.9 * logp.gather(-1, tokens[:, 1:, None])[..., 0] + 0.1 * logp.mean(-1)).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    return loss
"""
here: dict[str, Any] = {}
exec(_SMOOTHED, here)


def test_trainer_shifts_labels_that_it_smooths(family, tmp_path):
    base, model = tiny_model(family), upscaled_model(family, acting=False)
    assert torch.equal(here["smoothed"](model, tmp_path), here["smoothed"](base, tmp_path))
    if family == "llama":  # also without the package
        model.save_pretrained(tmp_path / "made")
        code = 'smoothed(AutoModelForCausalLM.from_pretrained("made", trust_remote_code=True), "run")\n'
        run_python(_SMOOTHED + code, tmp_path, package_present=False)


@pytest.mark.parametrize("model_type", ["llava", "gemma3"])
def test_trainer_shifts_labels_of_composite_models(model_type, tmp_path):
    composite_model(model_type).save_pretrained(tmp_path / "base")
    upscale(base=tmp_path / "base", method="midus-hml", output=tmp_path / "made", options={"n": 8, "k": 3})
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "made")
    here["smoothed"](model, tmp_path)
    for table in ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"):
        listed = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES")
        assert listed[model.config.model_type] == type(model).__name__, table


def test_older_expert_adapters_find_the_experts():
    peft = pytest.importorskip("peft")
    host_type("mixtral")
    base = type_model("mixtral")
    config = peft.LoraConfig(target_modules=["q_proj", "w1", "w2", "w3"], task_type="CAUSAL_LM")
    hosted, native = (peft.get_peft_model(each, copy.deepcopy(config)) for each in (host_of(base), base))
    lora, found = ({name for name, _ in each.named_parameters() if "lora_" in name} for each in (native, hosted))
    assert lora == found
    assert any("experts" in name for name in lora)


@pytest.mark.parametrize("model_type", ["hyperclovax", "granite", "gemma2"])
def test_fused_losses_of_trl_scale_logits_as_the_model_does(model_type):
    utils, base = pytest.importorskip("trl.trainer.utils"), type_model(model_type)
    host_type(model_type)
    model = host_of(base).eval()
    if hasattr(model.config, "logits_scaling"):
        model.config.logits_scaling = 0.25
    assert "logit_scale" not in model.config.to_dict()
    tokens = prompt() % model.config.vocab_size
    with torch.no_grad():
        plain = model(tokens, labels=tokens).loss
        utils.add_fused_lm_head(model)
        fused = model(tokens, labels=tokens, fused_lm_head=True).loss
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)


def test_classes_are_shown_only_by_the_module_transformers():
    assert "midus_gpt2" not in CONFIG_MAPPING
    assert "midus_nothing" not in CONFIG_MAPPING
    name = FAMILIES["gemma2"].__name__
    assert getattr(transformers, name) is FAMILIES["gemma2"]
    assert isinstance(transformers.models, types.ModuleType)
    assert type(transformers.models) is type(transformers)
    assert not hasattr(transformers.models, name)
    assert not hasattr(transformers.models.llama, name)


def test_broken_family_warns_and_others_load(tmp_path):
    program = """
        import warnings
        from transformers.models.qwen2 import modeling_qwen2
        del modeling_qwen2.Qwen2DecoderLayer
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            from midus_hf.models import FAMILIES
        print([str(each.message) for each in caught if "midus_qwen2" in str(each.message)], sorted(FAMILIES))
        """
    result = run_python(textwrap.dedent(program), tmp_path, package_present=True)
    message, _, families = result.rpartition("[")
    assert "checkpoints of midus_qwen2 cannot be loaded" in message
    assert "'llama'" in families
    assert "'qwen2'" not in families
