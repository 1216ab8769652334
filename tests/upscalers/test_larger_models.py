"""Language models within models that read pictures: all else is carried byte for byte."""

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from composite import TYPES, composite_model, picture_with_text
from models.fresh_process import run_python
from pairs import by_default, taking_turns
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from midus_hf.anatomy.types import UnknownType
from midus_hf.memories.module import DeclaredModule
from midus_hf.models.families import COMPOSITE_FAMILIES
from midus_hf.models.saved_models import load_model
from midus_hf.training.optim import set_trainable
from tests.upscalers.checkpoints import edit_config
from tests.upscalers.contents import config_of, file_digests
from tests.upscalers.methods import SMALL_CHAPTERS, SMALL_TABLES
from upscalers.runs.inspection import inspect_checkpoint
from upscalers.runs.strip import extract, strip
from upscalers.runs.upscale import upscale

OPTIONS = {"llama-pro": {}, "moc": SMALL_CHAPTERS, "ultramem-v2": SMALL_TABLES, "midus-hml": {"n": 8, "k": 3}}
# Heads of several sizes, and experts at listed layers: no memory can be inserted.
LACKING = {("gemma4", "midus-hml"), ("llama4", "midus-hml")}
CELLS = [cell for cell in itertools.product(TYPES, OPTIONS) if cell not in LACKING]
USUAL = [cell for cell in taking_turns(TYPES, OPTIONS) if cell in CELLS]
of_cells = pytest.mark.parametrize(("model_type", "method"), by_default(USUAL, CELLS))
of_types = pytest.mark.parametrize("model_type", by_default(TYPES[:3], TYPES))


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    @cache
    def base(model_type: str) -> Path:
        folder = tmp_path_factory.mktemp(model_type) / "base"
        composite_model(model_type).save_pretrained(folder)
        return folder

    @cache
    def cell(model_type: str, method: str) -> tuple[Path, Path]:
        output = tmp_path_factory.mktemp(f"{model_type}-{method}") / "upscaled"
        upscale(base=base(model_type), method=method, output=output, options=OPTIONS[method])
        return base(model_type), output

    return cell


def loaded(folder: Path, acting: bool = False) -> Any:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for module in model.modules() if acting else ():
            if isinstance(module, DeclaredModule):
                for parameter in module.parameters():
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def logits(model: Any, model_type: str) -> torch.Tensor:
    with torch.no_grad():
        return model(**picture_with_text(model_type)).logits


@of_cells
def test_composite_starts_as_the_base_and_strips(cells, model_type, method, tmp_path):
    folder, output = cells(model_type, method)
    base, upscaled = loaded(folder), loaded(output)
    assert torch.equal(logits(upscaled, model_type), logits(base, model_type))
    inputs = {**picture_with_text(model_type), "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(upscaled.generate(**inputs), base.generate(**inputs))
    assert upscaled.config.model_type.removeprefix("midus_") == model_type
    result = strip(output, tmp_path / "stripped")
    assert result["base_confirmed"] is True
    assert result["model_type"] == model_type
    assert file_digests(tmp_path / "stripped").items() >= file_digests(folder).items()


@of_types
def test_composite_with_values_saves_and_loads(cells, model_type, tmp_path):
    folder, output = cells(model_type, "moc")
    base, upscaled = loaded(folder), loaded(output, acting=True)
    changed = logits(upscaled, model_type)
    assert not torch.equal(changed, logits(base, model_type))
    upscaled.save_pretrained(tmp_path / "trained")
    as_text = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float32).eval()
    for model in (loaded(tmp_path / "trained"), as_text):
        assert torch.equal(logits(model, model_type), changed)
    assert strip(tmp_path / "trained", tmp_path / "stripped")["base_confirmed"] is True


@of_types
def test_composite_cached_steps_equal_one_pass(cells, model_type):
    model, inputs = loaded(cells(model_type, "moc")[1], acting=True), picture_with_text(model_type)
    text = model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    extended = dict(inputs, input_ids=text[:, :-1], attention_mask=torch.ones_like(text[:, :-1]))
    for name in {"mm_token_type_ids", "token_type_ids"} & inputs.keys():
        extended[name] = torch.nn.functional.pad(inputs[name], (0, 5))
    length = inputs["input_ids"].shape[1]
    with torch.no_grad():
        assert torch.equal(model(**extended).logits[:, length - 1 :].argmax(-1), text[:, length:])
    ids, settings = torch.arange(3, 13)[None], {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    plain = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
    padded, mask = torch.nn.functional.pad(ids, (2, 0), value=0), (torch.arange(12) >= 2).long()[None]
    assert torch.equal(model.generate(input_ids=padded, attention_mask=mask, **settings)[:, -4:], plain[:, -4:])


WITHOUT_THE_PACKAGE = """
from transformers import AutoModelForImageTextToText
model = AutoModelForImageTextToText.from_pretrained("trained", dtype=torch.float32, trust_remote_code=True).eval()
with torch.no_grad():
    logits = model(**torch.load("inputs.pt")).logits
print(type(model).__module__.startswith("transformers_modules"), float((logits - torch.load("logits.pt")).abs().max()))
"""


def test_composite_loads_without_the_package(cells, tmp_path):
    model = loaded(cells("gemma3", "moc")[1], acting=True)
    model.save_pretrained(tmp_path / "trained")
    torch.save(dict(picture_with_text("gemma3")), tmp_path / "inputs.pt")
    torch.save(logits(model, "gemma3"), tmp_path / "logits.pt")
    own_code, difference = run_python(WITHOUT_THE_PACKAGE, tmp_path, package_present=False).split()
    assert own_code == "True"
    assert float(difference) < 1e-5


def test_upscaled_composite_is_upscaled_again(cells, tmp_path):
    base, once = cells("mistral3", "moc")
    upscale(base=once, method="midus-hml", output=tmp_path / "twice", options=OPTIONS["midus-hml"])
    assert torch.equal(logits(loaded(tmp_path / "twice"), "mistral3"), logits(loaded(base), "mistral3"))
    assert inspect_checkpoint(tmp_path / "twice")["method"] == "midus-hml"
    strip(tmp_path / "twice", tmp_path / "stripped")
    told = ("upscale.json", "README.md")
    assert file_digests(once, told) == file_digests(tmp_path / "stripped", told)


@of_types
def test_language_model_is_extracted(cells, model_type, tmp_path):
    for folder in cells(model_type, "moc"):
        result = extract(folder, tmp_path / folder.name)
        alone = AutoModelForCausalLM.from_pretrained(tmp_path / folder.name, dtype=torch.float32).eval()
        assert type(alone).__name__.endswith("ForCausalLM")
        assert result["left_out"] > 0
        ids = torch.arange(3, 15)[None]
        with torch.no_grad():
            assert torch.equal(alone(ids).logits, loaded(folder)(input_ids=ids).logits)
    auto_map = config_of(tmp_path / "upscaled")["auto_map"]
    assert auto_map["AutoModelForCausalLM"] == f"modeling_midus.{type(alone).__name__}"
    assert strip(tmp_path / "upscaled", tmp_path / "stripped")["base_confirmed"] is None


def test_extracted_model_strips_twice(cells, tmp_path):
    base, once = cells("gemma3", "moc")
    upscale(base=once, method="llama-pro", output=tmp_path / "twice")
    for name, folder in (("plain", base), ("0", tmp_path / "twice")):
        extract(folder, tmp_path / name)
    for number in range(2):
        strip(tmp_path / f"{number}", tmp_path / f"{number + 1}")
    assert config_of(tmp_path / "2") == config_of(tmp_path / "plain")
    assert file_digests(tmp_path / "2")["model.safetensors"] == file_digests(tmp_path / "plain")["model.safetensors"]


@pytest.mark.parametrize(("model_type", "message"), [
    ("qwen2_5_vl", "transformers loads only within a composite model .*; expected one that is also loaded"),
    ("llama5", "model_type 'llama5' is unknown .transformers .* Install a newer transformers"),
    ("clip", "is loaded by no class for text and images or sounds"),
])  # fmt: skip
def test_unsupported_composite_is_refused(model_type, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "text_config": {}}))
    with pytest.raises(ValueError, match=message):
        upscale(base=tmp_path, method="moc", dry_run=True)


def test_incomplete_or_separate_model_is_refused(base, tmp_path):
    with pytest.raises(ValueError, match="is a separate language model, of type 'llama'; expected one within"):
        extract(base, tmp_path / "alone")
    composite_model("llava").save_pretrained(tmp_path / "base")
    vision = {**config_of(tmp_path / "base")["vision_config"], "num_hidden_layers": 3}
    edit_config(tmp_path / "base", vision_config=vision)
    with pytest.raises(ValueError, match=r"the base lacks .* tensors that its config requires, vision_tower"):
        upscale(base=tmp_path / "base", method="moc", output=tmp_path / "upscaled", options=SMALL_CHAPTERS)


def test_composite_without_classes_takes_dense_methods(tmp_path, monkeypatch):
    base, output = tmp_path / "base", tmp_path / "upscaled"
    composite_model("llava").save_pretrained(base)
    monkeypatch.delitem(COMPOSITE_FAMILIES, "llava", raising=False)
    unknown = Mock(side_effect=UnknownType("'llava' does not pass all keyword arguments on to its language model."))
    monkeypatch.setattr("midus_hf.models.families.template.type_of", unknown)
    with pytest.raises(ValueError, match=r"language model within 'llava' cannot host memory: .* \(upscale extract\)"):
        upscale(base=base, method="moc", options=SMALL_CHAPTERS, output=output)
    upscale(base=base, method="llama-pro", output=output)


def test_training_on_text_leaves_the_tower(cells):
    model, missing = load_model(str(cells("gemma3", "moc")[1]), dtype="float32")
    assert not missing
    assert set_trainable(model).parameters
    ids = torch.arange(3, 15)[None]
    model.train()(input_ids=ids, labels=ids).loss.backward()
    learning = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert learning
    assert not any("vis" in name or "projector" in name for name in learning)
