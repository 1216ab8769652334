"""A name that stands for no model is refused in one line, and quickly where nobody answers."""

import pytest

from midus_hf.model_names import check_model_name


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
            "'folder/model.gguf', a GGUF file; expected a folder of safetensors. Only upscale",
        ),
        ("folder/model.gguf", ["model.gguf"], "'folder/model.gguf', a GGUF file; expected a folder of safetensors."),
        ("folder", ["notes.txt"], "'folder', a folder without config.json; expected that of a saved model."),
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
        path.parent.mkdir(exist_ok=True)
        path.touch()
    with pytest.raises(ValueError) as refusal:
        check_model_name("model", name)
    assert str(refusal.value).startswith(f"model is {message}")


def test_a_model_of_the_cache_is_asked_for_nowhere(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: str(tmp_path / file))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *names, **options: asked.append(names))
    check_model_name("model", "owner/cached")
    assert not asked
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: None)
    check_model_name("model", "owner/new")
    assert asked == [("owner/new",)]


def test_an_adapter_that_was_saved_beside_its_model_does_not_hide_the_model(tmp_path):
    (tmp_path / "adapter_config.json").touch()
    (tmp_path / "config.json").touch()
    check_model_name("model", str(tmp_path))
