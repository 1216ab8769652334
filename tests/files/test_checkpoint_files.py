"""One list says what files a checkpoint has, and `upscale` goes by it where it replaces checkpoints."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from midus_hf.files.checkpoint_files import (
    CONFIG,
    TOKENIZER,
    WEIGHTS,
    indexed_weights,
    is_lfs_pointer,
    is_of,
    named_code,
    refuse_lfs_pointers,
)
from midus_hf.files.outputs import foreign_files

# Whether `upscale --overwrite` may remove a file of this name from a checkpoint.
OURS = {
    "model.safetensors": True,
    "model-00001-of-00002.safetensors": True,
    "model-00001.safetensors": False,
    "model-mine.safetensors": False,
    "model-1-of-2.safetensors.bak": False,
    "model-00001-of-00002.backup.safetensors": False,
    "model-00001-mine-of-00002.safetensors": False,
    "model.safetensors.index.json": True,
    "data.safetensors": False,
    "config.json": True,
    "generation_config.json": True,
    "vocab.json": True,
    "tekken.json": True,
    "preprocessor_config.json": True,
    "additional_chat_templates/tool_use.jinja": True,
    "additional_chat_templates/notes.txt": False,
    # Names that an author of a base chose: upscale copies them, runs do not.
    "tokenizer_of_ours.json": True,
    "qwen.tiktoken": True,
    "SYSTEM_PROMPT.txt": True,
    "vocabulary.csv": True,
    ".tokenizer.json": False,
    "LICENSE": True,
    "LICENCE.md": True,
    "COPYING": True,
    "USE_POLICY.md": True,
    "upscale.json": True,
    "README.md": True,
    "modeling_midus.py": True,
    "midus_mine.py": False,
    "train.py": False,
    "memory_bank/hier-ffn/bank.json": True,
    "memory_bank/hier-ffn/level-12.safetensors": True,
    "memory_bank/hier-ffn/level-mine.safetensors": False,
    "memory_bank/hier-ffn/level-1-mine.safetensors": False,
    "memory_bank/notes.txt": False,
    "training_args.bin": True,
    "trainer_state.json": True,
    "optimizer.pt": False,
    "rng_state_1.pth": False,
    "adapter_model.safetensors": False,
    "block_states/0/level-1.safetensors": False,
    "train_config.yaml": True,
    ".train_config.yaml.midus-partial": False,
    "runs/events.out.tfevents.1": False,
    "runs/Nov21/events.out.tfevents.1": False,
    "runs/events": False,
    ".gitattributes": True,
    "notes.txt": False,
    ".env": False,
    ".git/HEAD": False,
    "config.json.bak": False,
    "checkpoint-5/trainer_state.json": False,
    ".cache/huggingface": False,  # a file
    ".cache/mine": False,
}


def put(folder, name):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("x")


@pytest.mark.parametrize("name", OURS)
def test_whose_a_file_is(name, tmp_path):
    put(tmp_path, name)
    assert (not foreign_files(tmp_path)) is OURS[name]


def test_shards_that_an_index_names_are_weights(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "weights.safetensors"}}))
    for name in ("weights.safetensors", "others.safetensors"):
        (tmp_path / name).touch()
    assert foreign_files(tmp_path) == ["others.safetensors"]


NAMES = ["one.safetensors", "../two.safetensors", "deep/three.safetensors", "notes.txt", 5]
NOT_SOUND = ["no JSON", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {"a": []}}', "[" * 100_000]


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        (json.dumps({"weight_map": dict(enumerate(NAMES))}), {"one.safetensors"}),
        *((text, set()) for text in NOT_SOUND),
    ],
)
def test_an_index_names_only_weights_that_lie_beside_it_and_nothing_where_it_is_not_sound(tmp_path, text, weights):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert indexed_weights(tmp_path) == weights


@pytest.mark.parametrize(
    "name",
    ["LlamaTokenizer", "Qwen2Tokenizer", "GemmaTokenizer", "GPT2Tokenizer", "T5Tokenizer", "TokenizersBackend"],
)
def test_the_files_of_tokenizers_are_known(name):
    files = tokenizer_class_from_name(name).vocab_files_names.values()
    assert files and all(is_of(file, TOKENIZER) for file in files)


def test_they_need_no_torch():
    modules = ", ".join(f"midus_hf.files.{name}" for name in ("checkpoint_files", "outputs"))
    code = f"import sys, {modules}; sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


CODE = {
    "tokenization_own.py": "from .helpers_own import f\nimport .more\nfrom . import not_followed\nimport json\n",
    "helpers_own.py": "    from .tokenization_own import g\n    from .v1.parts import h\n",
    "v1.parts.py": "",
    "more.py": "x = 1  # \xe9\n",
    "not_followed.py": "",
    "unnamed.py": "",
    "processing-own.py": "raise SystemExit",
    "video.py": "",
}


def name_code(folder, **configs):
    folder.mkdir()
    for name, auto_map in configs.items():
        (folder / f"{name}.json").write_text(json.dumps({"auto_map": auto_map}))
    for name, text in CODE.items():
        (folder / name).write_text(text, encoding="utf-8")


def test_code_that_configs_name_is_followed_as_transformers_follows_it(tmp_path):
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
    assert set(foreign_files(folder)) == {"not_followed.py", "unnamed.py"}


@pytest.mark.parametrize(
    "auto_map",
    [
        {"AutoTokenizer": ["../outside.Own", "/etc/outside.Own"]},
        {"AutoTokenizer": "owner/other--tokenization_own.Own"},
        {"AutoTokenizer": ["..outside.Own", ".hidden.Own", "absent.Own", "", None, 5]},
        [None],
        "..",
        7,
        None,
    ],
)
def test_only_plain_names_of_files_in_the_folder_are_code_of_it(tmp_path, auto_map):
    (tmp_path / "outside.py").touch()
    name_code(tmp_path / "base", tokenizer_config=auto_map)
    (tmp_path / "base" / ".hidden.py").touch()
    assert named_code(tmp_path / "base") == []
    (tmp_path / "base" / "tokenizer_config.json").write_text("[")
    assert named_code(tmp_path / "base") == []


def test_imports_that_lead_out_of_the_folder_are_not_followed(tmp_path):
    (tmp_path / "outside.py").touch()
    name_code(tmp_path / "base", tokenizer_config={"AutoTokenizer": "unnamed.Own"})
    (tmp_path / "base" / "unnamed.py").write_text(
        "from ..outside import x\nfrom ./../outside import y\nfrom ./etc/z import y\n"
    )
    assert [path.name for path in named_code(tmp_path / "base")] == ["unnamed.py"]


def test_lfs_pointers_are_refused_by_name(tmp_path):
    refuse_lfs_pointers(tmp_path / "absent", WEIGHTS)
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "part-a.safetensors", "b": "b.safetensors"}}'
    )
    for name in ("part-a.safetensors", "b.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\n")
    message = (
        rf"^b.safetensors, part-a.safetensors of {tmp_path} are Git LFS pointers, not the files; expected what git-lfs downloads. "
        r"Run git lfs pull there\.$"
    )
    with pytest.raises(ValueError, match=message):
        refuse_lfs_pointers(tmp_path, WEIGHTS)
    refuse_lfs_pointers(tmp_path, CONFIG)


def test_lfs_pointers_are_told_from_files(tmp_path):
    pointer = tmp_path / "model.safetensors"
    pointer.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab12' * 16}\nsize 17477929\n")
    assert is_lfs_pointer(pointer)
    for other in (b"", b"version https://git-lfs", b"a text about version https://git-lfs.github.com/spec/v1\n"):
        pointer.write_bytes(other)
        assert not is_lfs_pointer(pointer)
