"""What an output says of itself, and what comes along from the base, its tokenizer too."""

import itertools
import json
import re
import shutil

import pytest
import torch
import yaml
from composite import composite_model
from huggingface_hub import ModelCard
from models.fresh_process import run_python
from pairs import by_default, taking_turns
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from training.tiny_run import save_upscaled
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import midus_hf
from midus_hf.models.families import HEAD_KINDS
from midus_hf.version import __version__
from tests.upscalers.checkpoints import (
    MEMORY_OPTIONS,
    RECORD,
    REQUEST,
    Recorder,
    edit_config,
    save_base,
    unverified,
    with_memory,
)
from tests.upscalers.contents import config_of, file_digests, load, read_tensors, recipe_of, record_of
from tests.upscalers.hub_server import Repository, files_of
from upscalers.checkpoint.source import Source
from upscalers.checkpoint.tokenizer import keep_tokenizer, name_processors
from upscalers.edits.checkpoint_edit import shuffle
from upscalers.request import Progress, VerificationError
from upscalers.runs.inspection import find_other_code, inspect_code
from upscalers.runs.strip import extract, strip
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
    assert config["dtype"] == "float32"
    assert "torch_dtype" not in config


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
        assert command("--base", "org/base", *REQUEST, "--overwrite").status == 0, licence
        metadata = ModelCard.load(tmp_path / "out" / "README.md").data
        assert (metadata.base_model, metadata.base_model_relation) == ("org/base", "finetune"), licence
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
        outcome = command("inspect", model)
        assert outcome.status == 1
        assert line in " ".join(outcome.out.split())
        assert f"has code that midus-hf {__version__} does not generate" in outcome.err
    code.unlink()
    outcome = command("inspect", model)
    assert inspect_code(model) is None
    assert outcome.status == 0
    assert "carried code" not in outcome.out


def own(name: str) -> str:
    return f"modeling_midus.{name}"


OTHER_CODE = [
    ("config.json", {"auto_map": {"AutoConfig": own("A"), "AutoModelForCausalLM": "evil.B"}}, ["evil.B"]),
    (
        "config.json",
        {"text_config": {"auto_map": {"AutoModel": "me/model--modeling_midus.B"}}},
        ["me/model--modeling_midus.B"],
    ),
    ("config.json", {"custom_pipelines": {"ask": {"impl": "evil.Ask", "pt": ["AutoModel"]}}}, ["evil.Ask"]),
    ("config.json", {"configuration_files": ["config.5.0.0.json"]}, ["config.5.0.0.json"]),
    ("config.5.0.0.json", {"auto_map": {"AutoConfig": "evil.C"}}, ["evil.C"]),
    ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.T", None]}}, ["evil.T"]),
    ("tokenizer_config.json", {"auto_map": [None, "/tmp/evil.T"]}, ["/tmp/evil.T"]),
    (
        "processor_config.json",
        {"image_processor": {"auto_map": {"AutoImageProcessor": {"pil": "evil.P"}}}},
        ["evil.P"],
    ),
    ("video_preprocessor_config.json", {"auto_map": {"AutoVideoProcessor": "modeling_midus.x.P"}}, [own("x.P")]),
    ("config.json", {"auto_map": {"AutoModel": own("B"), "AutoConfig": None}, "note": "evil.N"}, []),
]


@pytest.mark.parametrize(("file", "content", "names"), OTHER_CODE)
def test_code_named_elsewhere_is_found(tmp_path, file, content, names):
    (tmp_path / file).write_text(json.dumps(content))
    (tmp_path / "evil.py").write_text("from .more import x\nraise SystemExit")
    (tmp_path / "more.py").touch()
    modules = {True: ["evil.py", "more.py"], False: []}
    expected = [{"file": file, "name": name, "modules": modules[name.startswith("evil.")]} for name in names]
    assert find_other_code(tmp_path) == expected


def test_code_named_elsewhere_is_told_first(tmp_path, command):
    model = save_upscaled("llama", tmp_path)
    assert (command("inspect", model).status, find_other_code(model)) == (0, [])
    edit_config(model, auto_map={"AutoConfig": "evil.X"})
    (model / "custom_generate").mkdir()
    (model / "custom_generate" / "generate.py").touch()
    outcome = command("inspect", model)
    told = "NOT checked, and run with trust_remote_code=True: config.json names evil.X; custom_generate/generate.py\n"
    assert outcome.status == 1
    assert outcome.out.startswith(told)
    assert "read it before" in outcome.err.lower()
    listed = command("inspect", model, "--json")
    assert (listed.status, [each["name"] for each in listed.json()["other_code"]]) == (1, ["evil.X", None])


TEXT = "In 1984, don't   forget: naïve x=3.14!"


def save_tokenizer(folder, tokenizer_class: str | None) -> None:
    """A byte-level BPE without the pre-tokenizer that a family's own class would put in its place."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    corpus = ["In 1984, don't forget 3.14", "naive x=3.14! don't", "1984 1984  3.14   forget"]
    bpe.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=128, initial_alphabet=[], show_progress=False))
    bpe.save(str(folder / "tokenizer.json"))
    config = {"model_max_length": 128} | ({"tokenizer_class": tokenizer_class} if tokenizer_class else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


CLASSES = [None, "PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer"]
OF_FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
USUAL = [*taking_turns(CLASSES, OF_FAMILIES), (None, "qwen2")]


@pytest.mark.parametrize(("tokenizer_class", "of_family"), by_default(USUAL, itertools.product(CLASSES, OF_FAMILIES)))
def test_tokenizer_reads_as_before(tmp_path, of_family, tokenizer_class):
    base, out = save_base(tmp_path / "base", of_family), tmp_path / "out"
    save_tokenizer(base, tokenizer_class)
    unverified(base, out)
    assert_reads_alike(base, out)
    made = file_digests(out)
    assert keep_tokenizer(Source(str(base), base), out, Progress()) == {}  # what is chosen right is left as it is
    assert file_digests(out) == made
    assert_strips(out, base, tmp_path)


def assert_reads_alike(base, other):
    before, after = AutoTokenizer.from_pretrained(base), AutoTokenizer.from_pretrained(other)
    assert type(after) is type(before)
    assert after(TEXT).input_ids == before(TEXT).input_ids


def assert_strips(out, base, folder):
    strip(out, folder / "stripped")
    assert file_digests(folder / "stripped", without=RECORD) == file_digests(base)


# Types with a class of their own, without one, and those whose files Transformers corrects.
SOME_TYPES = ("qwen2", "phi3", "olmo2", "gpt_neox", "minimax_m2")
EVERY_TYPE = (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,)


@pytest.mark.parametrize("types", by_default([SOME_TYPES], [SOME_TYPES, EVERY_TYPE]), ids=len)
def test_types_keep_their_tokenizers(types, tmp_path):
    """Transformers names a class for each type, and corrects what files of some types name."""
    changed, base, out = {}, tmp_path / "base", tmp_path / "out"
    for tokenizer_class, model_type in itertools.product((None, "LlamaTokenizerFast"), types):
        for folder, its_type in ((base, model_type), (out, f"midus_{model_type}")):
            folder.mkdir(exist_ok=True)
            save_tokenizer(folder, tokenizer_class)
            (folder / "config.json").write_text(json.dumps({"model_type": its_type}))
        progress = Recorder()
        record = keep_tokenizer(Source(str(base), base), out, progress)
        if progress.warnings:  # its own class wants another vocabulary
            continue
        changed[tokenizer_class, model_type] = bool(record)
        assert_reads_alike(base, out)
    assert changed[None, "qwen2"]
    assert len(changed) > sum(changed.values()) > 1


# The expression that Mistral published first, which does not part words where capitals begin, and what it makes of digits.
PUBLISHED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CAPITALS = "eBay sells NaOH at pH 7 in mL, 2048"


def save_mistral(folder, digits: str):
    """A base of Mistral whose tokenizer Transformers mends, as it mends those of more than 100,000 tokens."""
    save_base(folder, "mistral", vocab_size=100_352, hidden_size=8, intermediate_size=8)
    bpe, split = Tokenizer(models.BPE()), pre_tokenizers.Split(Regex(PUBLISHED % digits), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    bpe.decoder, alphabet = decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([CAPITALS] * 2, trainer)
    saved = json.loads(bpe.to_str())
    saved["model"]["vocab"] |= {f"filler{number}": number for number in range(len(saved["model"]["vocab"]), 100_300)}
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    (folder / "tokenizer_config.json").write_text(json.dumps({"fix_mistral_regex": True}))
    edit_config(folder, transformers_version="4.57.1")
    return folder


@pytest.mark.parametrize(("digits", "method"), [("", "midus-hml"), ("{1,3}", "midus-hml"), ("", "llama-pro")])
def test_tokenizer_fixed_by_type_stays_fixed(digits, method, tmp_path, command):
    base, out = save_mistral(tmp_path / "base", digits), tmp_path / "out"
    options = ("--set", "n=8", "--set", "k=2") if method == "midus-hml" else ("--num-new-layers", "1")
    done = command("--base", base, "--method", method, "--output", out, *options)
    mended = AutoTokenizer.from_pretrained(base)
    assert mended(CAPITALS).input_ids != Tokenizer.from_file(str(base / "tokenizer.json")).encode(CAPITALS).ids
    line = "the tokenizer is written as transformers loads the base's: by the base's model_type it reads the same files differently."
    assert done.status == 0
    assert (line in done.err) is (method == "midus-hml")
    assert "local_files_only" not in (out / "tokenizer_config.json").read_text()
    trained, stripped, edited = (tmp_path / name for name in ("trained", "stripped", "edited"))
    AutoModelForCausalLM.from_pretrained(out).save_pretrained(trained)  # with the version of today, as a run does
    AutoTokenizer.from_pretrained(out).save_pretrained(trained)
    told = command("strip", out, "--output", stripped)
    assert ("the tokenizer's files are not the base's:" in told.err) is (method == "midus-hml")
    shuffle(out, edited, seed=1) if method == "midus-hml" else shutil.copytree(out, edited)
    for folder in (out, trained, stripped, edited):
        assert AutoTokenizer.from_pretrained(folder)(CAPITALS).input_ids == mended(CAPITALS).input_ids, folder


def test_changed_tokenizer_is_an_error(tmp_path, monkeypatch):
    base = save_base(tmp_path / "base")
    save_tokenizer(base, None)
    original = AutoTokenizer.from_pretrained

    def other_ids(*args, **kwargs):
        loaded = original(*args, **kwargs)
        if "partial" in str(args[0]):
            loaded._tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        return loaded

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", other_ids)
    with pytest.raises(VerificationError, match=r"tokenizes a text differently .*expected the same ids"):
        unverified(base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_broken_tokenizer_is_copied_with_a_warning(tmp_path, command):
    base = save_base(tmp_path / "base", "gemma3")
    save_tokenizer(base, None)  # Gemma's own class, which wants an <unk> that this vocabulary lacks
    done = command("--base", base, *REQUEST[:2], "--output", tmp_path / "out", *REQUEST[4:])
    line = r"warning: the base's tokenizer does not work here \(.*unk.*\); its files are copied unchanged\.\n"
    assert done.status == 0
    assert re.search(line, done.err)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()


def test_processors_stay_those_of_the_base(tmp_path, command):
    base, out, name = tmp_path / "base", tmp_path / "out", "preprocessor_config.json"
    composite_model("llava").save_pretrained(base)
    save_tokenizer(base, None)
    (base / name).write_text('{"size": {"shortest_edge": 28}}')
    done = command("--base", base, *REQUEST[:2], "--output", out, *REQUEST[4:]).succeeded()
    assert f"{name} names LlavaProcessor and LlavaImageProcessor, which" in done.err
    made, named = (out / name).read_bytes(), {"processor_class": "LlavaProcessor", "size": {"shortest_edge": 28}}
    assert json.loads(made).items() >= named.items()
    for auto in (AutoImageProcessor, AutoProcessor):
        before, after = auto.from_pretrained(base), auto.from_pretrained(out)
        assert type(after) is type(before)
        assert type(before).__name__.startswith("Llava")
    assert name_processors("llava", out, Progress()) == {}  # what is named stays as it is
    assert (out / name).read_bytes() == made
    assert_strips(out, base, tmp_path)
    extract(base, tmp_path / "alone")  # of another type too
    assert_reads_alike(base, tmp_path / "alone")


OWN_CODE = """
open({ran!r}, "a").write("ran")
from transformers import PreTrainedTokenizer
from .own_letters import LETTERS
class OwnTokenizer(PreTrainedTokenizer):
    vocab_size = 128
    def get_vocab(self): return dict(LETTERS)
    def _tokenize(self, text, **options): return list(text)
    def _convert_token_to_id(self, token): return LETTERS[token]
    def _convert_id_to_token(self, index): return chr(index)
    def save_vocabulary(self, folder, filename_prefix=None): return ()
"""


def test_tokenizer_code_is_copied_and_never_run(tmp_path, command, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.exit("a person was asked"))
    base, out, ran = save_base(tmp_path / "base"), tmp_path / "out", tmp_path / "ran"
    (base / "tokenization_own.py").write_text(OWN_CODE.format(ran=str(ran)))
    (base / "own_letters.py").write_text("LETTERS = {chr(i): i for i in range(128)}\n")
    named = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    (base / "tokenizer_config.json").write_text(json.dumps(named))
    done = command("--base", base, *REQUEST[:2], "--output", out, *REQUEST[4:]).succeeded()
    assert "own_letters.py, tokenization_own.py, code of the base's tokenizer or processor, are copied" in done.err
    assert "the base's tokenizer does not work here (it is custom code, which is never run)" in done.err
    assert_strips(out, base, tmp_path)
    unverified(base, out, overwrite=True)  # nothing in the folder is foreign
    shuffle(out, tmp_path / "edited", seed=1)
    assert (tmp_path / "edited" / "own_letters.py").is_file()
    assert not ran.exists()
    for folder in (base, tmp_path / "edited"):
        assert AutoTokenizer.from_pretrained(folder, trust_remote_code=True)("abc").input_ids == [97, 98, 99]
    assert ran.exists()


def test_git_lfs_pointers_are_refused(tmp_path, command, refused):
    base = save_base(tmp_path / "base", max_shard_size="30KB")
    for name in ("tokenizer.json", "generation_config.json", "model-00002-of-00010.safetensors"):
        (base / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 17477929\n")
        done = command("--base", base, "--method", "llama-pro", "--output", tmp_path / "out")
        refused(done, f"{name} of {base} is a Git LFS pointer, not the file; expected what git-lfs", ["base"])
        (base / name).unlink()
