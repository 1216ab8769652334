"""Models are loaded in one place, bars are for terminals, and wrong models are refused in one line."""

import ast
import re
import sys
import warnings
from logging import getLogger
from pathlib import Path

import pytest
import torch
from evaluation.byte_models import byte_tokenizer, save_byte_model
from safetensors.torch import load_file, save_file
from tokenizers import processors
from tqdm import tqdm
from transformers.utils import logging

from midus_hf.config.errors import first_line
from midus_hf.models.saved_models import load_for_reading, load_model
from midus_hf.sources import progress as bars
from midus_hf.sources.names import check_model_name, check_sources, short_names, usable_device
from midus_hf.sources.progress import limit_bars, quiet_libraries, show_progress, without_library_bars
from midus_hf.sources.tokenizers import load_tokenizer, without_suffix_tokens

ROOT = Path(__file__).parent.parent


def test_models_are_loaded_in_one_place():
    loads = ("AutoModelForCausalLM.from_pretrained", "AutoTokenizer.from_pretrained")
    files = (ROOT / "midus_hf").rglob("*.py")
    result = {file.name for file in files if any(load in file.read_text(encoding="utf-8") for load in loads)}
    # A card shows a reader how to load the model, and a refusal how to write a GGUF file as one. Packs read the tokenizer next to
    # their model, in code that a checkpoint carries.
    assert result == {"tokenizers.py", "cards.py", "names.py", "glossary_files.py"}


def test_loads_state_trust_in_code():
    """Calls by which an Auto class may load code of a model, in `partial` too."""
    calls, folders = {}, [ROOT / name for name in ("midus_hf", "upscalers", "demo", "scripts")]
    for file in (file for folder in folders for file in folder.rglob("*.py")):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            parts = (ast.unparse(part) for part in (call.func, *call.args)) if isinstance(call, ast.Call) else ()
            if any(re.match(r"(Auto\w*|auto_class_of\(.*\))\.from_(pretrained|config)$", part) for part in parts):
                calls[f"{file.relative_to(ROOT)}:{call.lineno}"] = {keyword.arg for keyword in call.keywords}
    assert len(calls) > 15
    assert [place for place, keywords in calls.items() if "trust_remote_code" not in keywords] == []


@pytest.mark.parametrize(("load", "config", "message"), [
    (load_tokenizer, '{"auto_map": {"AutoTokenizer": ["own.Own", null]}}', "contains custom code which"),
    (load_model, '{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}', "trust_remote_code"),
], ids=["tokenizer", "model"])  # fmt: skip
def test_untrusted_code_is_not_run(load, config, message, tmp_path):
    save_byte_model("llama", tmp_path)
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    (tmp_path / ("config.json" if load is load_model else "tokenizer_config.json")).write_text(config)
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ValueError, match=message):
        load(str(tmp_path))
    with pytest.raises(SystemExit, match="it ran"):
        load(str(tmp_path), trust_remote_code=True)


NAMES = "tokenizer.json config.json generation_config.json model.safetensors adapter_model.safetensors".split()


@pytest.mark.parametrize("name", NAMES)
def test_lfs_files_are_named(tmp_path, name):
    load = load_tokenizer if name == "tokenizer.json" else load_model
    save_byte_model("llama", tmp_path)
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 17477929\n")
    with pytest.raises(ValueError, match=rf"^{name} of {tmp_path} is a Git LFS pointer, .* Run git lfs"):
        load(str(tmp_path))


def test_missing_weights_are_named_in_order(tmp_path):
    save_byte_model("llama", tmp_path)
    assert load_model(str(tmp_path))[1] == []
    tensors = load_file(tmp_path / "model.safetensors")
    lacking = ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    kept = {name: tensor for name, tensor in tensors.items() if name not in lacking}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, missing = load_model(str(tmp_path), "bfloat16")
    assert (missing, model.dtype) == (lacking, torch.bfloat16)


def _template(single: str) -> processors.PostProcessor:
    return processors.TemplateProcessing(single=single, special_tokens=[("<bos>", 1), ("<eos>", 2)])


@pytest.mark.parametrize(("processor", "before"), [
    (None, []),
    (_template("<bos> $A"), [1]),
    (_template("$A <eos>"), []),
    (_template("<bos> $A <eos>"), [1]),
    (processors.Sequence([processors.ByteLevel(), _template("<bos> $A <eos>")]), [1]),
    (processors.ByteLevel(), []),
    (processors.RobertaProcessing(("<eos>", 2), ("<bos>", 1)), [1]),
])  # fmt: skip
def test_open_text_keeps_only_prefix_tokens(processor, before, tmp_path):
    folder, tokenizer = save_byte_model("llama", tmp_path), byte_tokenizer()
    plain = tokenizer("a text").input_ids
    if processor is not None:
        tokenizer.backend_tokenizer.post_processor = processor
    tokenizer.save_pretrained(folder)
    whole = tokenizer("a text").input_ids
    for read in (without_suffix_tokens(tokenizer), load_for_reading(str(folder), "auto", "cpu")[1]):
        assert read("a text").input_ids == [*before, *plain]
        assert read("a text<eos>").input_ids == [*before, *plain, 2]
    assert tokenizer("a text").input_ids == whole


@pytest.mark.parametrize("obeys", [True, False])
def test_slow_tokenizer_leaves_the_end_token_out(obeys):
    class Slow:
        add_eos_token = True

        def build_inputs_with_special_tokens(self, ids):
            return [1, *ids, 2] if self.add_eos_token or not obeys else [1, *ids]

        def decode(self, ids):
            return "</s>" if ids == [2] else ""

    tokenizer = Slow()
    if not obeys:
        with pytest.raises(ValueError, match=r"puts '</s>' .* expected one without it\. Set add_eos_token to"):
            without_suffix_tokens(tokenizer)
        return
    bare = without_suffix_tokens(tokenizer)
    assert bare.build_inputs_with_special_tokens([5]) == [1, 5]
    assert tokenizer.add_eos_token
    assert without_suffix_tokens(bare) is bare


BACKEND = "Couldn't instantiate the backend from one of:{}(1) a serialization file, {}(2) a slow one."


@pytest.mark.parametrize(("message", "expected"), [
    ("one\ntwo", "one"),
    ("", "ValueError"),
    (BACKEND.format("\n", "\n") + " \n\nYou need more.", BACKEND.format(" ", "")),
    ("refused:\n\n  this\nand that", "refused: this and that"),
    ("refused:", "refused:"),
    ("many: a\nb", "many: a"),
    ("many:\n" + "word " * 200, "many: " + "word " * 78 + "..."),
])  # fmt: skip
def test_first_line_of_an_error_is_complete(message, expected):
    assert first_line(ValueError(message)) == expected
    assert len(expected) <= 400


@pytest.mark.parametrize(("name", "files", "message"), [
    ("adapter", ["adapter_config.json"], "'adapter', an adapter of PEFT; expected a whole model. Merge"),
    ("folder", ["model.gguf"], "'folder/model.gguf', a GGUF file; expected a folder of safetensors. Write"),
    ("folder/model.gguf", ["model.gguf"], "'folder/model.gguf', a GGUF file; expected a folder of safetensors."),
    ("folder", ["notes.txt"], "'folder', a folder without config.json; expected that of a saved model."),
    (
        "folder",
        ["checkpoint-9/config.json", "checkpoint-10/config.json", "checkpoint-11/notes.txt"],
        "'folder', a folder without config.json; expected that of a saved model, such as checkpoint-10 in it."),
    ("folder/notes.txt", ["notes.txt"], "'folder/notes.txt', a file; expected the folder of a model, or its Hub"),
    ("./absent", [], "'./absent', which does not exist; expected the folder of a model, or its Hub id."),
    ("owner/absent", [], "'owner/absent', which is no folder here, and the Hub cannot be reached"),
    ("owner--x/absent", [], "'owner--x/absent', which is no folder here and not on the Hub;"),
])  # fmt: skip
def test_wrong_model_names_are_refused(name, files, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in files:
        path = tmp_path / name.partition("/")[0] / file
        path.parent.mkdir(exist_ok=True, parents=True)
        path.touch()
    with pytest.raises(ValueError, match=f"^model is {re.escape(message)}"):
        check_model_name("model", name)


def test_cached_model_is_not_fetched(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file, **_: str(tmp_path / file))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *names, **options: calls.append(names))
    check_model_name("model", "owner/cached")
    assert not calls
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file, **_: None)
    check_model_name("model", "owner/new")
    assert calls == [("owner/new",)]


@pytest.mark.parametrize(("key", "name", "expected"), [
    *((key, name, "a dataset id") for key, name in (("corpus", "texts/of/mine"), ("dataset_name", "/absent"))),
    *((key, "./absent", "a dataset id") for key in ("protect", "eval_text.wiki")),
    ("tree", "absent", "a tree of topics"),
    ("config_name", "./absent", "a file, a folder or a Hub id"),
    ("tokenizer_name", "./absent", "a folder or a Hub id"),
])  # fmt: skip
def test_absent_path_is_named_by_its_key(key, name, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"^{key} is '{name}', which does not exist; expected .*{expected}\.$"):
        check_sources([(key, name)])


def test_check_sources_reports_the_model_first(tmp_path):
    for name in ("text.txt", "adapter_config.json", "config.json"):
        (tmp_path / name).write_text("some text")
    check_model_name("model", str(tmp_path))  # an adapter next to it does not hide the model
    check_sources([("corpus", str(tmp_path / "text.txt")), ("eval_text", str(tmp_path)), ("corpus", "owner/texts")])
    check_sources([("protect", "owner/texts"), ("eval_text.wiki", "owner/texts")])
    with pytest.raises(ValueError, match=r"^model_name_or_path is"):
        check_sources([("corpus", "/absent"), ("model_name_or_path", "/absent")])


@pytest.mark.parametrize("device", ["cuda:99", "gpu", "meta", "hpu", "privateuseone"])
def test_unusable_device_is_refused(device):
    assert usable_device(None) == ("cuda" if torch.cuda.is_available() else "cpu")
    assert usable_device("cpu", "float64") == "cpu"
    message = rf"^device is '{device}', which cannot be used here \(.+\); expected one of: cpu(, cuda)?\.$"
    with pytest.raises(ValueError, match=message):
        usable_device(device)


@pytest.mark.parametrize(("models", "expected"), [
    (["runs/base", "runs/trained/"], ["base", "trained"]),
    (["HuggingFaceTB/SmolLM2-135M-Instruct"], ["SmolLM2-135M-Instruct"]),
    (["a/model", "b/model"], ["a/model", "b/model"]),
    (["."], ["."]),
])  # fmt: skip
def test_models_have_short_names(models, expected):
    assert short_names(models) == expected


def test_hidden_bars_come_back(library_bars):
    with pytest.raises(KeyError), without_library_bars():
        assert not logging.is_progress_bar_enabled()
        with without_library_bars():
            pass
        assert not logging.is_progress_bar_enabled()
        raise KeyError
    assert logging.is_progress_bar_enabled()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_bars_are_drawn_on_terminals_only(is_terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    assert [*show_progress("ab", desc="reading")] == ["a", "b"]
    with limit_bars():
        tqdm(total=2, desc="of a library", position=3).close()  # below other bars
        print("a line", file=sys.stderr)
    printed = capsys.readouterr().err
    assert ("\rreading: " in printed) == ("\rof a library: " in printed) == is_terminal
    assert is_terminal or printed == "a line\n"


@pytest.mark.parametrize("make_bar", [show_progress, tqdm])
def test_bars_print_a_line_a_minute(make_bar, monkeypatch, capsys):
    monkeypatch.setattr(bars, "_SECONDS_PER_LINE", 0)
    with limit_bars():
        bar = make_bar(total=2, desc="reading", unit=" texts", mininterval=0)
        bar.update(2)
        bar.close()
        print("a line", file=sys.stderr)
    lines = [line.partition("[")[0] for line in capsys.readouterr().err.splitlines()]
    assert "reading: 100%|##########| 2/2 " in lines
    assert lines[-1] == "a line"
    monkeypatch.setenv("RANK", "1")  # bars are of the first process
    assert [*show_progress("ab")] == ["a", "b"]
    assert not capsys.readouterr().err


def test_only_named_messages_of_libraries_are_hidden(capsys, recwarn):
    harness = getLogger("lm_eval.models.huggingface")
    with quiet_libraries():
        harness.warning("Passed an already-initialized model through `pretrained`, assuming")
        harness.warning("Label index was not in within range")
        warnings.warn("a tensor is missing", stacklevel=1)
        print("a table of a library")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1] == "a table of a library"
    assert [str(each.message) for each in recwarn] == ["a tensor is missing"]
    assert not harness.filters
