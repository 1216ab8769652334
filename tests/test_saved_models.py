"""Models and tokenizers are loaded in one place, and what cannot be loaded is refused in the caller's words."""

import ast
from collections.abc import Iterator
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
    # A card shows a reader how to load the model, and a refusal how to write a GGUF file as one.
    assert result == {"saved_models.py", "card_example.py", "model_names.py"}


def loads_by_auto_classes(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls by which an Auto class may load code of a model, `partial(AutoTokenizer.from_pretrained, ...)` among them."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        for part in (call.func, *call.args):
            if isinstance(part, ast.Attribute) and part.attr in ("from_pretrained", "from_config"):
                owner = ast.unparse(part.value)
                if owner.startswith(("Auto", "auto_class_of(")):
                    yield call


def test_each_load_says_whether_code_of_the_model_is_run_so_that_nobody_is_asked():
    folders = [ROOT / name for name in ("midus_hf", "upscalers", "demo", "scripts")]
    calls = {
        f"{file.relative_to(ROOT)}:{call.lineno}": {keyword.arg for keyword in call.keywords}
        for file in (file for folder in folders for file in folder.rglob("*.py"))
        for call in loads_by_auto_classes(ast.parse(file.read_text(encoding="utf-8")))
    }
    assert len(calls) > 15
    assert [place for place, keywords in calls.items() if "trust_remote_code" not in keywords] == []


@pytest.mark.parametrize(
    ("load", "config", "message"),
    [
        (
            load_tokenizer,
            '{"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", null]}}',
            "contains custom code which",
        ),
        (load_model, '{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}', "trust_remote_code"),
    ],
    ids=["tokenizer", "model"],
)
def test_code_that_comes_with_a_model_is_not_run_unless_it_is_trusted(load, config, message, tmp_path):
    save_byte_model("llama", tmp_path)
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    (tmp_path / ("config.json" if load is load_model else "tokenizer_config.json")).write_text(config)
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ValueError, match=message):
        load(str(tmp_path))
    with pytest.raises(SystemExit, match="it ran"):
        load(str(tmp_path), trust_remote_code=True)


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("tokenizer.json", load_tokenizer),
        ("config.json", load_model),
        ("generation_config.json", load_model),
        ("model.safetensors", load_model),
        ("adapter_model.safetensors", load_model),
    ],
)
def test_files_that_git_lfs_left_behind_are_named(tmp_path, name, load):
    save_byte_model("llama", tmp_path)
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 17477929\n")
    with pytest.raises(
        ValueError, match=rf"^{name} of {tmp_path} is a Git LFS pointer, not the file; expected .* Run git lfs"
    ):
        load(str(tmp_path))


def test_what_the_weights_lack_is_named_in_order(tmp_path):
    save_byte_model("llama", tmp_path)
    assert load_model(str(tmp_path))[1] == []
    tensors = load_file(tmp_path / "model.safetensors")
    lacking = ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    kept = {name: tensor for name, tensor in tensors.items() if name not in lacking}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, missing = load_model(str(tmp_path), "bfloat16")
    assert (missing, model.dtype) == (lacking, torch.bfloat16)


def test_a_refusal_is_the_callers_words_and_what_the_library_says():
    with pytest.raises(ValueError, match=r"^there is none: [^\n]+$"), refusing("there is none", OSError):
        load_tokenizer("absent/model")
    with pytest.raises(ValueError, match=r"^no: first$"), refusing("no", KeyError, OSError):
        raise OSError("first\nsecond")
    with pytest.raises(ValueError, match=r"^no: a b$"), refusing("no", KeyError, reason=lambda error: error.args[0]):
        raise KeyError("a b")
    with pytest.raises(RuntimeError, match=r"^other$"), refusing("no", OSError):
        raise RuntimeError("other")
