"""What an output says of itself: config entry, `upscale.json`, model card; and what travels along from the base."""

import itertools

import pytest
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

import midus_hf
from midus_hf.version import __version__
from tests.upscalers.checkpoints import (
    MEMORY_OPTIONS,
    config_of,
    content_digest,
    edit_config,
    file_digests,
    load,
    read_tensors,
    record_of,
    save_base,
    with_memory,
)

NOT_OF_THE_MODEL = ("pytorch_model.bin", "training_args.bin", "model.gguf", "modeling_x.py", ".gitattributes")
WORDS = ["<unk>", "<s>", "</s>", "hello", "world"]


def tokenizer() -> PreTrainedTokenizerFast:
    plain = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content }}", {"default": "{{ messages }}", "tool_use": "tools: {{ messages }}"}], ids=["one", "two"]
)  # fmt: skip
def test_tokenizer_and_chat_templates_travel(tmp_path, template):
    base = save_base(tmp_path / "base")
    original = tokenizer()
    original.chat_template = template
    original.save_pretrained(base)
    with_memory(base, tmp_path / "out")
    travelled = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert travelled.chat_template == template
    assert travelled("hello world").input_ids == original("hello world").input_ids == [3, 4]
    assert travelled.eos_token == "</s>"


def test_generation_config_and_licence_travel_and_what_is_not_the_models_does_not(tmp_path):
    base = save_base(tmp_path / "base")
    GenerationConfig(max_new_tokens=7, do_sample=True, temperature=0.3).save_pretrained(base)
    (base / "LICENSE").write_text("licence of the base")
    for name in ("README.md", "upscale.json", *NOT_OF_THE_MODEL):
        (base / name).write_text("of the base")
    (base / "onnx").mkdir()
    with_memory(base, tmp_path / "out")
    generation = load(tmp_path / "out").generation_config
    assert (generation.max_new_tokens, generation.temperature) == (7, 0.3)
    assert (tmp_path / "out" / "LICENSE").read_text() == "licence of the base"
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert (
        not {"pytorch_model.bin", "training_args.bin", "model.gguf", "modeling_x.py", ".gitattributes", "onnx"} & names
    )
    assert all((tmp_path / "out" / name).read_text() != "of the base" for name in ("README.md", "upscale.json"))


def test_the_config_remembers_what_was_done(family, shared_base, tmp_path):
    base = shared_base(family)
    with_memory(base, tmp_path / "out", placement="1,5", seed=3)
    entry = load(tmp_path / "out").config.upscale
    assert entry == {
        "method": "midus-hml",
        "new_layers": [1, 5],
        "trainable": "new",
        "plan": [
            {"base": 0},
            {"previous": 0, "next": 1, "sources": [1]},
            {"base": 1},
            {"base": 2},
            {"base": 3},
            {"previous": 3, "next": None, "sources": [3]},
        ],
        "options": MEMORY_OPTIONS,
        "seed": 3,
        "base_dtype": "float32",
        "base_config": config_of(base),
        "base_sha256": content_digest(read_tensors(base)),
    }  # fmt: skip


def test_the_config_names_the_memory_and_the_classes(family, shared_base, tmp_path):
    with_memory(shared_base(family), tmp_path / "out")
    config = config_of(tmp_path / "out")
    base_config = config_of(shared_base(family))
    assert config["model_type"] == f"midus_{base_config['model_type']}"
    assert config["memory"] == [{"type": "headwise", "site": "inserted", **MEMORY_OPTIONS, "layers": [1, 4]}]
    assert config["architectures"] == [f"Midus{base_config['architectures'][0]}"]
    assert config["num_hidden_layers"] == 6
    assert type(load(tmp_path / "out")).__name__ == config["architectures"][0]
    assert {"AutoConfig", "AutoModel", "AutoModelForCausalLM"} < set(config["auto_map"])
    changed = {"model_type", "memory", "architectures", "num_hidden_layers", "layer_types", "auto_map", "upscale"}
    if base_config.get("use_sliding_window"):
        changed.add("max_window_layers")
        assert config["max_window_layers"] == config["layer_types"].index("sliding_attention")
    assert {key: value for key, value in config.items() if key not in changed} == {
        key: value for key, value in base_config.items() if key not in changed
    }


def test_the_record_says_what_was_made_from_what(tmp_path):
    base = save_base(tmp_path / "base", dtype=torch.bfloat16, max_shard_size="30KB")
    report = with_memory(base, tmp_path / "out", seed=5, dtype="float32")
    record = record_of(tmp_path / "out")
    config = config_of(tmp_path / "out")
    assert record["midus_hf"] == __version__ == midus_hf.__version__
    assert {key: record[key] for key in config["upscale"]} == config["upscale"]
    assert (record["dtype"], record["seed"]) == ("float32", 5)
    assert record["parameters"] == vars(report.parameters)
    assert record["identity"].items() >= {"checked": "logits", "max_abs_diff": 0.0}.items()
    assert record["paper"]["reference"] == "arXiv:2512.13751"
    assert record["base"]["name"] == "base"
    assert record["base"]["revision"] is None
    assert record["base"]["dtype"] == "BF16"
    assert set(record["base"]["files"]) == {path.name for path in base.glob("*.safetensors")}
    assert sorted(itertools.chain(*record["base"]["files"].values())) == sorted(read_tensors(base))


def test_the_model_card_holds_configuration_plan_counts_and_citation(command, tmp_path):
    base = save_base(tmp_path / "base")
    report = with_memory(base, tmp_path / "out", placement="0,2,6", options={"n": 9, "k": 3}, seed=4)
    card = (tmp_path / "out" / "README.md").read_text()
    front, body = card.removeprefix("---\n").split("\n---\n", 1)
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["midus-hf", "midus-hml", "upscaled"],
    }
    assert body.startswith("\n# base, upscaled with midus-hml\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(body.split("```yaml\n")[1].split("```")[0])
    said = "`upscale --config FILE --base BASE --output DIR`, BASE being base, makes it again from:"
    assert said in body
    assert yaml.safe_load(recipe.read_text()) == {
        "method": "midus-hml",
        "placement": [0, 2, 6],
        "options": {**MEMORY_OPTIONS, "n": 9, "k": 3},
        "seed": 4,
        "dtype": "auto",
    }
    assert command("--config", recipe, "--base", base, "--output", tmp_path / "again").status == 0
    assert file_digests(tmp_path / "again") == file_digests(tmp_path / "out")
    for row in (
        "| **0** | **new, beside base 0, made from 0** |",
        "| 1 | base 0 |",
        "| **2** | **new, between base 0 and base 1, made from 1** |",
        "| **6** | **new, beside base 3, made from 3** |",
    ):
        assert row in body
    counts = report.parameters
    assert f"| {counts.base:,} | {counts.new:,} | {counts.total:,} | {counts.trainable:,} |" in body
    assert "It computes exactly what the base computes until it is trained." in body
    assert "MIDUS: Memory-Infused Depth Up-Scaling (arXiv:2512.13751)." in body
    assert "@article{midus," in body
    assert "AutoModelForCausalLM.from_pretrained(PATH, trust_remote_code=True)" in body


def test_reported_bytes_are_those_of_the_files(base, tmp_path):
    report = with_memory(base, tmp_path / "out")
    old, new = read_tensors(base), read_tensors(tmp_path / "out")
    copied = sum(t.nbytes for n, t in new.items() if ".memory." not in n)
    assert report.bytes.written == (tmp_path / "out" / "model.safetensors").stat().st_size
    assert report.bytes.read == copied > sum(tensor.nbytes for tensor in old.values())
    new_layers = ("model.layers.1.", "model.layers.4.")
    assert report.parameters.new == sum(t.numel() for n, t in new.items() if n.startswith(new_layers))
    assert report.seconds > 0
    assert report.peak_rss_bytes > 50_000_000


def test_a_cast_is_written_into_the_config(tmp_path):
    base = save_base(tmp_path / "base")
    edit_config(base, torch_dtype="float32", dtype=...)
    with_memory(base, tmp_path / "out", dtype="bfloat16")
    config = config_of(tmp_path / "out")
    assert config["dtype"] == "bfloat16"
    assert "torch_dtype" not in config


def test_the_fingerprint_of_the_base_follows_its_layout(tmp_path):
    fingerprints = []
    for name, changes in (("a", {}), ("b", {}), ("c", {"vocab_size": 130})):
        with_memory(save_base(tmp_path / name, **changes), tmp_path / f"out-{name}")
        record = record_of(tmp_path / f"out-{name}")
        fingerprints.append(record["base"]["layout_sha256"])
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
