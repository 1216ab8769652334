"""`transformers serve`: how its model manager finds classes that host memory, without a server; and pipelines."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from composite import composite_model
from models.upscaled import upscaled_model
from tiny import prompt, save_tiny_tokenizer
from transformers import pipeline
from transformers.cli.serving import model_manager
from transformers.pipelines import base

from midus_hf.models import FAMILIES
from midus_hf.models.families import COMPOSITE_FAMILIES
from upscalers.runs.upscale import upscale


@pytest.fixture
def manager() -> Iterator[model_manager.ModelManager]:
    """What `transformers serve --device cpu` loads models with."""
    manager = model_manager.ModelManager(device="cpu")
    yield manager
    manager.shutdown()


@pytest.fixture
def save(tmp_path):
    """Save a tiny model with memory that acts, and a tokenizer."""

    def saved(family: str):
        model = upscaled_model(family).eval()
        model.save_pretrained(tmp_path)
        save_tiny_tokenizer(tmp_path)
        return model

    return saved


def served(manager: model_manager.ModelManager, folder: Path):
    return manager.load_model_and_processor(manager.process_model_name(str(folder)))[0]


def test_the_server_finds_the_classes_of_every_family(native_family, manager, save, tmp_path):
    model = save(native_family)
    result = served(manager, tmp_path)
    assert type(result) is type(model) and type(result) in FAMILIES.values()
    with torch.no_grad():
        assert torch.equal(result(prompt()).logits, model(prompt()).logits)


def test_the_server_finds_a_composite_model(manager, tmp_path):
    composite_model("llava").save_pretrained(tmp_path / "base")
    upscale(base=tmp_path / "base", method="midus-hml", output=tmp_path / "upscaled", options={"n": 8, "k": 3})
    save_tiny_tokenizer(tmp_path / "upscaled")
    assert type(served(manager, tmp_path / "upscaled")) is COMPOSITE_FAMILIES["llava"]


def test_a_pipeline_continues_a_text_as_generate_does(family, save, tmp_path, monkeypatch):
    printed: list[str] = []
    monkeypatch.setattr(base.logger, "error", printed.append)  # of a class that the pipeline does not know
    model, greedy = save(family), {"max_new_tokens": 6, "do_sample": False}
    texts = ["word5 word9", "word7 word11 word20"]
    generator = pipeline("text-generation", model=str(tmp_path), device="cpu")
    assert type(generator.model) is type(model) and not printed
    for text, (result,) in zip(texts, generator(texts, return_full_text=False, **greedy), strict=True):
        ids = generator.tokenizer(text, return_tensors="pt").input_ids
        new = model.generate(ids, **greedy)[0, ids.shape[1] :]
        assert result["generated_text"] == generator.tokenizer.decode(new) and len(new) == 6
