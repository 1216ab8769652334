"""What an output says of itself: config entry, `upscale.json`, model card; what comes along from the base, its card too."""

import itertools

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from models.fresh_process import run_python
from tokenizers import Tokenizer, models, pre_tokenizers
from training.tiny_run import save_upscaled
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

import midus_hf
from midus_hf.models.families import HEAD_KINDS
from midus_hf.version import __version__
from tests.upscalers.checkpoints import MEMORY_OPTIONS, REQUEST, edit_config, save_base, unverified, with_memory
from tests.upscalers.contents import config_of, load, read_tensors, recipe_of, record_of
from tests.upscalers.hub_server import Repository, files_of
from upscalers.runs.inspection import inspect_code
from upscalers.runs.upscale import upscale

NOT_OF_THE_MODEL = ("pytorch_model.bin", "training_args.bin", "model.gguf", "modeling_x.py", ".gitattributes")
WORDS = "<unk> <s> </s> hello world Once upon a time there was".split()


def tokenizer() -> PreTrainedTokenizerFast:
    plain = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def test_accompanying_files_are_copied(tmp_path):
    base, out, original = save_base(tmp_path / "base"), tmp_path / "out", tokenizer()
    original.chat_template = {"default": "{{ messages }}", "tool_use": "tools: {{ messages }}"}
    original.save_pretrained(base)
    GenerationConfig(max_new_tokens=7, do_sample=True, temperature=0.3).save_pretrained(base)
    for name in ("LICENSE", "README.md", "upscale.json", *NOT_OF_THE_MODEL):
        (base / name).write_text("of the base")
    (base / "onnx").mkdir()
    unverified(base, out)
    copied, generation = AutoTokenizer.from_pretrained(out), load(out).generation_config
    assert (copied.chat_template, copied.eos_token) == (original.chat_template, "</s>")
    assert copied("hello world").input_ids == original("hello world").input_ids == [3, 4]
    assert (generation.max_new_tokens, generation.temperature) == (7, 0.3)
    assert not {*NOT_OF_THE_MODEL, "onnx"} & {path.name for path in out.iterdir()}
    kept = {name: (out / name).read_text() == "of the base" for name in ("LICENSE", "README.md", "upscale.json")}
    assert kept == {"LICENSE": True, "README.md": False, "upscale.json": False}


def test_record_has_the_base_and_the_cast(tmp_path):
    base = save_base(tmp_path / "base", dtype=torch.bfloat16, max_shard_size="30KB")
    edit_config(base, torch_dtype="bfloat16", dtype=...)
    with_memory(base, tmp_path / "out", seed=5, dtype="float32")
    record, config = record_of(tmp_path / "out"), config_of(tmp_path / "out")
    assert record["midus_hf"] == __version__ == midus_hf.__version__
    assert (record["dtype"], record["seed"], record["paper"]["reference"]) == ("float32", 5, "arXiv:2512.13751")
    assert (record["base"]["name"], record["base"]["revision"], record["base"]["dtype"]) == ("base", None, "BF16")
    assert set(record["base"]["files"]) == {path.name for path in base.glob("*.safetensors")}
    assert sorted(itertools.chain(*record["base"]["files"].values())) == sorted(read_tensors(base))
    assert config["dtype"] == "float32" and "torch_dtype" not in config


def test_card_has_request_layers_counts_and_citation(tmp_path):
    base = save_base(tmp_path / "base")
    counts = with_memory(base, tmp_path / "out", placement="0,2,6", options={"n": 9, "k": 3}, seed=4).parameters
    body = (tmp_path / "out" / "README.md").read_text().split("\n---\n", 1)[1]
    assert body.startswith("\n# base, upscaled with midus-hml\n")
    request = {"method": "midus-hml", "placement": [0, 2, 6], "options": {**MEMORY_OPTIONS, "n": 9, "k": 3}}
    assert yaml.safe_load(recipe_of(tmp_path / "out")) == {**request, "seed": 4, "dtype": "auto"}
    for part in (
        "`upscale --config FILE --base BASE --output DIR`, BASE being base, makes it again from:",
        "| **0** | **new, beside base 0, made from 0** |\n| 1 | base 0 |\n| **2** | **new, between base 0 and base 1,",
        f"| {counts.base:,} | {counts.new:,} | {counts.total:,} | {counts.trainable:,} |",
        "MIDUS: Memory-Infused Depth Up-Scaling (arXiv:2512.13751).",
        "@article{midus,",
        "AutoModelForCausalLM.from_pretrained(PATH, trust_remote_code=True)",
    ):
        assert part in body


def test_config_names_memory_and_classes(shared_base, tmp_path):
    base = shared_base("gemma3")
    report = with_memory(base, tmp_path / "out", verify=False)
    config, before, new = config_of(tmp_path / "out"), config_of(base), read_tensors(tmp_path / "out")
    assert config["memory"] == [{"type": "midus-hml", "site": "inserted", **MEMORY_OPTIONS, "layers": [1, 4]}]
    assert config["model_type"] == f"midus_{before['model_type']}"
    assert config["architectures"] == [f"Midus{before['architectures'][0]}"] == [type(load(tmp_path / "out")).__name__]
    heads = {name for name in config["auto_map"] if name.endswith(HEAD_KINDS)}
    assert {"AutoConfig", "AutoModel", "AutoModelForCausalLM"} == set(config["auto_map"]) - heads
    assert "AutoModelForSequenceClassification" in heads
    changed = {"model_type", "memory", "architectures", "num_hidden_layers", "layer_types", "auto_map", "upscale"}
    assert {key for key in config.keys() | before.keys() if config.get(key) != before.get(key)} <= changed
    assert report.bytes.read == sum(tensor.nbytes for name, tensor in new.items() if ".memory." not in name)


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
tags: [chat, mlx, "arxiv:2407.10671", "region:us", Safetensors]
datasets: [org/texts]
extra_gated_prompt: Say yes.
---
# The base's own words
"""
NEW_TAGS = ["midus-hf", "midus-hml", "upscaled"]
PLAIN = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": NEW_TAGS}


@pytest.fixture
def base(tmp_path):
    return save_base(tmp_path / "base")


@pytest.fixture
def metadata_from(base, command, tmp_path):
    """Upscale a local base with this card; what the result's card says, and what was said meanwhile."""

    def make(card: str | bytes | None) -> tuple[dict, str, str]:
        if card is not None:
            (base / "README.md").write_bytes(card if isinstance(card, bytes) else card.encode())
        done = command("--base", base, *REQUEST[:2], "--output", tmp_path / "out", *REQUEST[4:], "--overwrite")
        made = ModelCard.load(tmp_path / "out" / "README.md")
        return made.data.to_dict(), made.text, done.err

    return make


LINK = "https://example.org/licence"
CARRIED = {"license": "other", "license_name": "qwen-research", "license_link": LINK, "language": ["en", "no"]}
CARRIED |= {"base_model": "org/first", "base_model_relation": "finetune"}
SEVERAL = "license: [mit, apache-2.0]\nbase_model: [org/a, /tmp/other, org/b]\nlanguage: en\nmodel-index:\n- broken"
WRONG_TYPES = "---\nlicense:\nlanguage: [3, {a: b}]\ntags: [7]\n---\n"
# The base's card, the metadata that the result's card has in addition, and its licence, or how a warning ends.
CARDS = [
    *((card, {}, None) for card in (None, "# Only words", "---\n---\nnothing", WRONG_TYPES)),
    (CARD, CARRIED, "qwen-research (https://example.org/licence)"),
    (f"---\n{SEVERAL}\n---\n", {"license": ["mit", "apache-2.0"], "base_model": ["org/a", "org/b"], "language": "en",
                               "base_model_relation": "finetune"}, "mit, apache-2.0."),
    *((card, {}, "its licence and languages are not carried over. Add them")
      for card in ("---\nlicense: [mit\n---\n", "---\n- a list\n---\n", "---\n1: x\n---\n", b"---\nlicense: \xff\xfe\n---\n")),
]  # fmt: skip


def test_card_keeps_licence_languages_and_base(metadata_from, tmp_path):
    for card, carried, told in CARDS:
        metadata, text, warned = metadata_from(card)
        assert metadata == {**PLAIN, **carried}, card
        assert ("## Licence" in text, warned != "") == (bool(carried), told is not None and not carried), card
        assert told is None or told in (text if carried else " ".join(warned.split())), card
        assert "The base's own words" not in text
    metadata_from(CARD)
    unverified(tmp_path / "out", tmp_path / "again", method="midus-pkm")
    metadata = ModelCard.load(tmp_path / "again" / "README.md").data
    assert (metadata.license_name, metadata.base_model) == ("qwen-research", "org/first")
    assert metadata.tags == ["midus-hf", "midus-pkm", "upscaled"]


def test_card_names_and_links_a_base_on_the_hub(hub, base, command, tmp_path):
    files = files_of(base)
    for licence, further in (("TERMS.md", {}), ("LICENSE", {"LICENSE": b"terms"})):
        card = CARD.replace(LINK, licence).encode()
        hub.repositories["org/base"] = repository = Repository({**files, "README.md": card, **further})
        assert command("--base", "org/base", *REQUEST, "--overwrite").status == 0
        metadata = ModelCard.load(tmp_path / "out" / "README.md").data
        assert (metadata.base_model, metadata.base_model_relation) == ("org/base", "finetune")
        there = f"https://huggingface.co/org/base/blob/{repository.revision}/{licence}"
        assert metadata.license_link == (licence if further else there)
    assert (tmp_path / "out" / "LICENSE").read_text() == "terms"


@pytest.mark.parametrize("method", ["midus-hml", "llama-pro"])
def test_card_example_runs_without_the_package(base, tmp_path, method):
    tokenizer().save_pretrained(base)
    options = {"n": 8, "k": 2} if method == "midus-hml" else None
    upscale(base=base, method=method, output=tmp_path / "out", options=options, verify=False)
    example = (tmp_path / "out" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert "AutoTokenizer.from_pretrained(PATH" in example
    assert run_python(example, tmp_path / "out", package_present=False).startswith("Once upon a time")


HEADER, OTHER = f"midus-hf {__version__} wrote", f"is NOT what midus-hf {__version__} generates"
CHANGES = [
    ("import torch\n", "import torch\nimport socket\n", f"{OTHER}: read it before"),
    (HEADER, "midus-hf 9.9.9 wrote", "written by midus-hf 9.9.9; install that version to compare it"),
    (HEADER, "Somebody wrote", OTHER),
]


def test_changed_code_is_reported(tmp_path, command):
    model = save_upscaled("llama", tmp_path)
    code = model / "modeling_midus.py"
    generated = code.read_text()
    assert inspect_code(model) == {"file": code.name, "version": __version__, "as_generated": True}
    printed = " ".join(command("inspect", model).out.split())
    assert f"carried code modeling_midus.py, as midus-hf {__version__} generates it" in printed
    for old, new, line in CHANGES:
        code.write_text(generated.replace(old, new, 1))
        assert inspect_code(model)["as_generated"] is False
        assert line in " ".join(command("inspect", model).out.split())
    code.unlink()
    assert inspect_code(model) is None and "carried code" not in command("inspect", model).out
