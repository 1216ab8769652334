"""What of the base's model card still holds, and what it becomes in the upscaled model's card."""

import os
import subprocess
import sys

import pytest
from huggingface_hub import ModelCard
from models.fresh_process import _BLOCK_IMPORTS
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.upscalers.checkpoints import save_base
from tests.upscalers.hub_server import Repository, files_of
from upscalers.runs.upscale import upscale

REQUEST = ("--method", "midus-hml", "--output", "out", "--set", "n=8", "--set", "k=2", "--no-verify")
CARD = """---
language:
- en
- no
license: other
license_name: qwen-research
license_link: https://example.org/licence
library_name: mlx
pipeline_tag: image-text-to-text
base_model: org/first
base_model_relation: quantized
tags:
- chat
- mlx
- arxiv:2407.10671
- region:us
- Safetensors
datasets: [org/texts]
extra_gated_prompt: Say yes.
---
# The base's own words
"""
NEW_TAGS = ["midus-hf", "midus-hml", "upscaled"]


@pytest.fixture
def base(tmp_path):
    return save_base(tmp_path / "base")


@pytest.fixture
def metadata_from(base, command, tmp_path):
    """Upscale a local base with this card; what the result's card says, and what was said meanwhile."""

    def make(card: str | bytes | None) -> tuple[dict, str, str]:
        if card is not None:
            (base / "README.md").write_bytes(card if isinstance(card, bytes) else card.encode())
        done = command("--base", base, *REQUEST[:2], "--output", tmp_path / "out", *REQUEST[4:])
        assert done.status == 0, done.err
        made = ModelCard.load(tmp_path / "out" / "README.md")
        return made.data.to_dict(), made.text, done.err

    return make


def test_licence_languages_and_tags_that_hold_are_carried_over(metadata_from):
    metadata, text, said = metadata_from(CARD)
    assert metadata == {
        "language": ["en", "no"],
        "license": "other",
        "license_name": "qwen-research",
        "license_link": "https://example.org/licence",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "org/first",
        "base_model_relation": "finetune",
        "tags": [*NEW_TAGS, "chat"],
    }
    assert "qwen-research (https://example.org/licence)" in text
    assert "The base's own words" not in text
    assert said == ""


def test_a_base_on_the_hub_is_named_itself_and_links_to_its_files_reach_it(hub, base, command, tmp_path):
    (base / "README.md").write_text(CARD.replace("https://example.org/licence", "TERMS.md"))
    hub.repositories["org/base"] = repository = Repository(files_of(base))
    assert command("--base", "org/base", *REQUEST).status == 0
    metadata = ModelCard.load(tmp_path / "out" / "README.md").data
    assert (metadata.base_model, metadata.base_model_relation) == ("org/base", "finetune")
    assert metadata.license_link == f"https://huggingface.co/org/base/blob/{repository.revision}/TERMS.md"
    repository.files["LICENSE"] = b"terms"
    repository.files["README.md"] = CARD.replace("https://example.org/licence", "LICENSE").encode()
    assert command("--base", "org/base", *REQUEST, "--overwrite").status == 0
    assert ModelCard.load(tmp_path / "out" / "README.md").data.license_link == "LICENSE"
    assert (tmp_path / "out" / "LICENSE").read_text() == "terms"


@pytest.mark.parametrize(
    "card",
    [None, "", "# Only words", "---\n---\nnothing", "---\nlicense:\nlanguage: [3, {a: b}]\ntags: [7]\n---\n"],
    ids=["no card", "empty", "no metadata", "empty metadata", "metadata of other types"],
)
def test_a_base_that_says_nothing_gives_a_card_that_claims_nothing(metadata_from, card):
    metadata, text, said = metadata_from(card)
    assert metadata == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": NEW_TAGS}
    assert "## Licence" not in text
    assert said == ""


@pytest.mark.parametrize(
    "card",
    ["---\nlicense: [mit\n---\n", "---\n- a list\n---\n", "---\n1: x\n---\n", b"---\nlicense: \xff\xfe\n---\n"],
    ids=["no YAML", "a list", "keys that are no words", "no UTF-8"],
)
def test_metadata_that_cannot_be_read_is_warned_of_and_the_work_goes_on(metadata_from, card):
    metadata, _, said = metadata_from(card)
    assert metadata == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": NEW_TAGS}
    said = " ".join(said.split())
    assert "warning: the metadata of the base's model card cannot be read (" in said
    assert "its licence and languages are not carried over. Add them to README.md of the output." in said


def test_evaluation_results_that_hold_for_the_base_alone_do_not_matter(metadata_from):
    metadata, _, said = metadata_from("---\nlicense: mit\nlanguage: en\nmodel-index:\n- broken\n---\n")
    assert (metadata["license"], metadata["language"]) == ("mit", "en")
    assert said == ""


def test_several_licences_and_bases_stay_several_and_paths_are_no_bases(metadata_from):
    metadata, text, _ = metadata_from(
        "---\nlicense: [mit, apache-2.0]\nbase_model: [org/a, /tmp/checkpoint, org/b]\n---\n"
    )
    assert metadata["license"] == ["mit", "apache-2.0"]
    assert metadata["base_model"] == ["org/a", "org/b"]
    assert "mit, apache-2.0." in text


def test_upscaling_again_keeps_licence_and_base(metadata_from, command, tmp_path):
    metadata_from(CARD)
    done = command("--base", tmp_path / "out", "--method", "midus-pkm", "--output", tmp_path / "again", *REQUEST[4:])
    assert done.status == 0, done.err
    metadata = ModelCard.load(tmp_path / "again" / "README.md").data
    assert (metadata.license_name, metadata.base_model) == ("qwen-research", "org/first")
    assert metadata.tags == ["midus-hf", "midus-pkm", "upscaled", "midus-hml", "chat"]


def test_the_card_says_how_to_load_the_model_where_it_lies(metadata_from, tmp_path, monkeypatch):
    _, text, _ = metadata_from(None)
    lines = text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path / "out")
    found: dict = {}
    exec(lines, found)  # with PATH, which a card in a folder defines
    assert found["model"].config.num_hidden_layers == 6


@pytest.mark.parametrize("method", ["midus-hml", "llama-pro"])
def test_the_cards_example_runs_as_pasted_where_the_package_is_not_installed(base, tmp_path, method):
    words = {
        "<unk>": 0,
        "</s>": 1,
        **{word: 2 + number for number, word in enumerate("Once upon a time there was".split())},
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>").save_pretrained(base)
    options = {"n": 8, "k": 2} if method == "midus-hml" else None
    upscale(base=base, method=method, output=tmp_path / "out", options=options, verify=False)
    example = (tmp_path / "out" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert "AutoTokenizer.from_pretrained(PATH" in example
    program = f"{_BLOCK_IMPORTS}\n{example}"
    told = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path / "out",
        env=told,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.startswith("Once upon a time"), done.stderr
