"""One list says what files a checkpoint has, and which ones `upscale` replaces; results in cards."""

import json
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from midus_hf.files.cards import read_card, without_results, without_section, write_card
from midus_hf.files.checkpoint_files import (
    CONFIG,
    OF_UPSCALED,
    TOKENIZER,
    WEIGHTS,
    indexed_weights,
    is_of,
    named_code,
    read_json,
    refuse_lfs_pointers,
)
from midus_hf.files.outputs import foreign_files
from midus_hf.memories.bank import bank_patterns

EVERY = (*OF_UPSCALED, *bank_patterns())
# What `upscale --overwrite` removes from a checkpoint; its last lines have names that an author of a base chose.
OURS = """
model.safetensors model-00001-of-00002.safetensors model.safetensors.index.json
config.json generation_config.json preprocessor_config.json vocab.json tekken.json additional_chat_templates/tool_use.jinja
upscale.json README.md modeling_midus.py train_config.yaml training_args.bin trainer_state.json .gitattributes
.cache/huggingface/download/config.json.metadata
memory_bank/hier-ffn/bank.json memory_bank/hier-ffn/level-12.safetensors
tokenizer_of_ours.json qwen.tiktoken SYSTEM_PROMPT.txt vocabulary.csv LICENSE LICENCE.md COPYING USE_POLICY.md
""".split()
# What it leaves; `.cache/huggingface` is a file here.
FOREIGN = """
model-00001.safetensors model-mine.safetensors model-1-of-2.safetensors.bak model-00001-of-00002.backup.safetensors
model-00001-mine-of-00002.safetensors data.safetensors adapter_model.safetensors config.json.bak .tokenizer.json
additional_chat_templates/notes.txt notes.txt midus_mine.py train.py .train_config.yaml.midus-partial
memory_bank/hier-ffn/level-mine.safetensors memory_bank/hier-ffn/level-1-mine.safetensors memory_bank/notes.txt
optimizer.pt rng_state_1.pth block_states/0/level-1.safetensors checkpoint-5/trainer_state.json
runs/events.out.tfevents.1 runs/Nov21/events.out.tfevents.1 runs/events .env .git/HEAD .cache/huggingface .cache/mine
""".split()


@pytest.mark.parametrize("name", OURS + FOREIGN)
def test_file_owners_are_known(name, tmp_path):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("x")
    assert (not foreign_files(tmp_path, EVERY)) is (name in OURS)


NAMES = ["one.safetensors", "../two.safetensors", "deep/three.safetensors", "notes.txt", 5]
NOT_SOUND = ["no JSON", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {"a": []}}', "[" * 100_000]


@pytest.mark.parametrize("text", [json.dumps({"weight_map": dict(enumerate(NAMES))}), *NOT_SOUND])
def test_index_names_only_weights_in_its_folder(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    for name in ("one.safetensors", "others.safetensors"):
        (tmp_path / name).touch()
    weights = set() if text in NOT_SOUND else {"one.safetensors"}
    assert indexed_weights(tmp_path) == weights
    assert {*foreign_files(tmp_path, EVERY)} == {"one.safetensors", "others.safetensors"} - weights


@pytest.mark.parametrize("kind", ["Llama", "Gemma", "GPT2", "T5", "TokenizersBackend"])
def test_tokenizer_files_are_known(kind):
    files = tokenizer_class_from_name(
        kind if kind.endswith("Backend") else f"{kind}Tokenizer"
    ).vocab_files_names.values()
    assert {is_of(file, TOKENIZER) for file in files} == {True}


CODE = {
    "tokenization_own.py": "from .helpers_own import f\nimport .more\nfrom . import not_followed\nimport json\n",
    "helpers_own.py": "    from .tokenization_own import g\n    from .v1.parts import h\n",
    "v1.parts.py": "",
    "more.py": "x = 1  # \xe9\n",
    "not_followed.py": "",
    "unnamed.py": "from ..outside import x\nfrom ./../outside import y\nfrom ./etc/z import y\n",
    "processing-own.py": "raise SystemExit",
    "video.py": "",
}


def name_code(folder, **configs):
    folder.mkdir()
    for name, auto_map in configs.items():
        (folder / f"{name}.json").write_text(json.dumps({"auto_map": auto_map}))
    for name, text in CODE.items():
        (folder / name).write_text(text, encoding="utf-8")


def test_code_is_followed_as_transformers_does(tmp_path):
    folder = tmp_path / "base"
    name_code(
        folder,
        tokenizer_config={"AutoTokenizer": ["tokenization_own.Slow", None]},
        processor_config={"AutoProcessor": "processing-own.Own"},
        video_preprocessor_config={"AutoVideoProcessor": "video.Own"},
    )
    by_transformers = {Path(file).name for file in get_relative_import_files(folder / "tokenization_own.py")}
    expected = {*by_transformers, "tokenization_own.py", "processing-own.py", "video.py"}
    assert {path.name for path in named_code(folder)} == expected
    assert by_transformers == {"helpers_own.py", "more.py", "v1.parts.py", "tokenization_own.py"}
    (folder / "model.safetensors").touch()
    assert set(foreign_files(folder, EVERY)) == {"not_followed.py", "unnamed.py"}


@pytest.mark.parametrize(
    ("auto_map", "followed"),
    [
        ({"AutoTokenizer": ["../outside.Own", "/etc/outside.Own"]}, []),
        ({"AutoTokenizer": "owner/other--tokenization_own.Own"}, []),
        ({"AutoTokenizer": ["..outside.Own", ".hidden.Own", "absent.Own", "", None, 5]}, []),
        ({"AutoTokenizer": "unnamed.Own"}, ["unnamed.py"]),  # which imports what lies outside
        ([None], []),
        ("..", []),
    ],
)
def test_only_plain_names_are_code(tmp_path, auto_map, followed):
    (tmp_path / "outside.py").touch()
    name_code(tmp_path / "base", tokenizer_config=auto_map)
    (tmp_path / "base" / ".hidden.py").touch()
    assert [path.name for path in named_code(tmp_path / "base")] == followed
    (tmp_path / "base" / "tokenizer_config.json").write_text("[")
    assert named_code(tmp_path / "base") == []


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab12' * 16}\nsize 17477929\n"


def test_lfs_pointers_are_refused(tmp_path):
    refuse_lfs_pointers(tmp_path / "absent", WEIGHTS)
    index = '{"weight_map": {"a": "part-a.safetensors", "b": "b.safetensors", "c": "c.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    for name in ("part-a.safetensors", "b.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text(POINTER)
    message = f"^b.safetensors, part-a.safetensors of {tmp_path} are Git LFS pointers, .* Run git lfs pull"
    for other in ("", POINTER[:23], f"a text about {POINTER}"):
        (tmp_path / "c.safetensors").write_text(other)
        with pytest.raises(ValueError, match=message):
            refuse_lfs_pointers(tmp_path, WEIGHTS)
    refuse_lfs_pointers(tmp_path, CONFIG)


@pytest.mark.parametrize(("content", "reason"), [
    (b"{", "Expecting property name"),
    (b"\xff\xfe", "'utf-8' codec can't decode"),
    (b"[" * 100_000, "it is nested too deeply"),
    (None, "No such file or directory"),
])  # fmt: skip
def test_unreadable_json_is_refused_by_its_path(content, reason, tmp_path):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))} is not JSON, or cannot be read \(.*{reason}"):
        read_json(path)


RESULTS = "model-index:\n- name: x\n  results:\n  - task: {type: a}\n\n# a comment\n    metrics: []\n"


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(("before", "results", "after"), [
    ("license: mit\n", RESULTS, "tags:\n- a\n"),
    ("", RESULTS, ""),
    ("a: model-index\n", '"model-index": []\n', "b: 1\n"),
    ("", "'model-index' : [\n  {name: x}]\n", "b: ü\n"),
])  # fmt: skip
def test_card_results_are_left_out_with_a_note(before, results, after, newline, capsys):
    body = "# Title\n---\nmodel-index:\n- of the text\n---\n"
    wholes = (f"---\n{before}{middle}{after}---\n{body}" for middle in (results, ""))
    with_results, without = (whole.replace("\n", newline) for whole in wholes)
    assert without_results(with_results, "training") == without
    said = "results in the card's metadata are left out, since they were measured before training\n"
    assert capsys.readouterr().err == said
    assert ModelCard(with_results.replace(newline, "\n"), ignore_metadata_errors=True).text == body


@pytest.mark.parametrize("content", [b"caf\xe9\r\n", b"\xff\n\xfe", "\ufeff# caf\u00e9\n".encode()])
def test_card_keeps_its_bytes(content, tmp_path):
    (tmp_path / "README.md").write_bytes(content)
    card = read_card(tmp_path)
    write_card(tmp_path, f"{card}more")
    assert (tmp_path / "README.md").read_bytes() == content + b"more"
    assert read_card(tmp_path / "none") is None


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_card_section_is_removed_with_any_line_end(newline):
    card = "# Title\n\n## Protected texts\n\nall\n\n## Trained\n\nlong\n".replace("\n", newline)
    left = without_section(card, "## Protected texts")
    assert left.split() == ["#", "Title", "##", "Trained", "long"]


@pytest.mark.parametrize("card", ["", "model-index:\n", "---\na: 1\n---\nmodel-index:\n- x\n", "---\nmodel-index:\n"])
def test_card_without_results_is_unchanged(card, capsys):
    assert without_results(card, "training") == card
    assert not capsys.readouterr().err
