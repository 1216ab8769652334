"""Models and tokenizers are loaded in one place, and what cannot be loaded is refused in the caller's words."""

from pathlib import Path

import pytest
import torch
from evaluation.byte_models import save_byte_model
from safetensors.torch import load_file, save_file

from midus_hf.saved_models import load_model, load_tokenizer, refusing

ROOT = Path(__file__).parent.parent


def test_nothing_else_loads_them():
    loads = ("AutoModelForCausalLM.from_pretrained", "AutoTokenizer.from_pretrained")
    files = (ROOT / "midus_hf").rglob("*.py")
    result = {file.name for file in files if any(load in file.read_text(encoding="utf-8") for load in loads)}
    assert result == {"saved_models.py", "card_example.py"}  # a card shows a reader how to load the model


def test_what_the_weights_lack_is_named_in_order(tmp_path):
    save_byte_model("llama", tmp_path)
    assert load_model(str(tmp_path))[1] == []
    tensors = load_file(tmp_path / "model.safetensors")
    lacking = ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    kept = {name: tensor for name, tensor in tensors.items() if name not in lacking}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, missing = load_model(str(tmp_path), "bfloat16")
    assert (missing, model.dtype) == (lacking, torch.bfloat16)


def test_code_that_comes_with_a_model_is_not_run_unless_it_is_trusted(tmp_path):
    save_byte_model("llama", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}')
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_model(str(tmp_path))
    with pytest.raises(SystemExit, match="it ran"):
        load_model(str(tmp_path), trust_remote_code=True)


def test_a_refusal_is_the_callers_words_and_what_the_library_says():
    with pytest.raises(ValueError, match=r"^there is none: [^\n]+$"), refusing("there is none", OSError):
        load_tokenizer("absent/model")
    with pytest.raises(ValueError, match=r"^no: first$"), refusing("no", KeyError, OSError):
        raise OSError("first\nsecond")
    with pytest.raises(ValueError, match=r"^no: a b$"), refusing("no", KeyError, reason=lambda error: error.args[0]):
        raise KeyError("a b")
    with pytest.raises(RuntimeError, match=r"^other$"), refusing("no", OSError):
        raise RuntimeError("other")
