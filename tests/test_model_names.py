"""A name that stands for no model is refused in one line, and quickly where nobody answers."""

import pytest
import torch

from midus_hf.model_names import check_model_name, check_sources, usable_device


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        (
            "adapter",
            ["adapter_config.json"],
            "'adapter', an adapter of PEFT; expected a whole model. Merge the adapter into",
        ),
        (
            "folder",
            ["model.gguf"],
            "'folder/model.gguf', a GGUF file; expected a folder of safetensors. Write one first, in",
        ),
        ("folder/model.gguf", ["model.gguf"], "'folder/model.gguf', a GGUF file; expected a folder of safetensors."),
        ("folder", ["notes.txt"], "'folder', a folder without config.json; expected that of a saved model."),
        (
            "folder",
            ["checkpoint-9/config.json", "checkpoint-10/config.json", "checkpoint-11/notes.txt"],
            "'folder', a folder without config.json; expected that of a saved model, such as checkpoint-10 in it.",
        ),
        (
            "folder/notes.txt",
            ["notes.txt"],
            "'folder/notes.txt', a file; expected the folder of a model, or its Hub id.",
        ),
        ("./absent", [], "'./absent', which does not exist; expected the folder of a model, or its Hub id."),
        (
            "owner/absent",
            [],
            "'owner/absent', which is no folder here, and the Hub cannot be reached (or HF_HUB_OFFLINE is set);",
        ),
        ("owner--/-x", [], "'owner--/-x', which does not exist; expected the folder of a model, or its Hub id."),
        ("owner--x/absent", [], "'owner--x/absent', which is no folder here and not on the Hub;"),
    ],
)
def test_what_is_no_model_is_called_what_it_is(name, files, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in files:
        path = tmp_path / name.partition("/")[0] / file
        path.parent.mkdir(exist_ok=True, parents=True)
        path.touch()
    with pytest.raises(ValueError) as refusal:
        check_model_name("model", name)
    assert str(refusal.value).startswith(f"model is {message}")


def test_a_model_of_the_cache_is_asked_for_nowhere(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file, **_: str(tmp_path / file))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *names, **options: calls.append(names))
    check_model_name("model", "owner/cached")
    assert not calls
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file, **_: None)
    check_model_name("model", "owner/new")
    assert calls == [("owner/new",)]


def test_an_adapter_that_was_saved_beside_its_model_does_not_hide_the_model(tmp_path):
    (tmp_path / "adapter_config.json").touch()
    (tmp_path / "config.json").touch()
    check_model_name("model", str(tmp_path))


@pytest.mark.parametrize(
    ("key", "name", "expected"),
    [
        ("corpus", "texts/of/mine", "a file, a folder or a dataset id"),
        ("corpus", "absent.jsonl", "a file, a folder or a dataset id"),
        ("dataset_name", "/absent", "a file, a folder or a dataset id"),
        ("protect", "absent.txt", "a file, a folder or a dataset id"),
        ("tree", "absent", "a tree of topics"),
        ("eval_text.wiki", "./absent", "a file, a folder or a dataset id"),
        ("config_name", "./absent", "a file, a folder or a Hub id"),
        ("tokenizer_name", "./absent", "a folder or a Hub id"),
    ],
)
def test_a_path_that_is_not_there_is_told_by_its_key(key, name, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"^{key} is '{name}', which does not exist; expected {expected}\.$"):
        check_sources([(key, name)])


def test_what_is_there_or_may_be_on_the_hub_is_taken(tmp_path):
    (tmp_path / "text.txt").touch()
    check_sources([("corpus", str(tmp_path / "text.txt")), ("eval_text", str(tmp_path)), ("corpus", "owner/texts")])
    check_sources([("protect", "owner/texts"), ("eval_text.wiki", "owner/texts")])


def test_of_two_mistakes_the_models_is_told_first(tmp_path):
    with pytest.raises(ValueError, match=r"^model_name_or_path is"):
        check_sources([("corpus", "/absent"), ("model_name_or_path", "/absent")])


def test_without_a_word_it_is_the_first_gpu_or_the_processor():
    assert usable_device(None) == ("cuda" if torch.cuda.is_available() else "cpu")
    assert usable_device("cpu", "float64") == "cpu"


@pytest.mark.parametrize("device", ["cuda:99", "gpu", "meta", "hpu", "privateuseone"])
def test_one_that_is_not_here_is_refused(device):
    with pytest.raises(
        ValueError, match=rf"^device is '{device}', which cannot be used here \(.+\); expected one of: cpu(, cuda)?\.$"
    ):
        usable_device(device)


def test_where_torch_asserts_that_it_was_built_for_it_that_is_the_reason(monkeypatch):
    def lacking(*shape, **options):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch, "zeros", lacking)
    with pytest.raises(
        ValueError, match=r"'cuda', which cannot be used here \(Torch not compiled with CUDA enabled\)"
    ):
        usable_device("cuda")
