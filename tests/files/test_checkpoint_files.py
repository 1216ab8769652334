"""One list says what files a checkpoint has, and those who replace checkpoints go by it: `upscale`, and runs in their outputs."""

import json
import subprocess
import sys

import pytest
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from midus_hf.files import ownership, run_files
from midus_hf.files.checkpoint_files import TOKENIZER, globs, indexed_weights, is_of
from midus_hf.files.run_files import remove_written

UPSCALE, RUN, CHECKPOINT = "upscale", "run", "checkpoint"

WHOSE = {
    "model.safetensors": {UPSCALE, RUN, CHECKPOINT},
    "model-00001-of-00002.safetensors": {UPSCALE, RUN, CHECKPOINT},
    "model-00001.safetensors": set(),
    "model-mine.safetensors": set(),
    "model-1-of-2.safetensors.bak": set(),
    "model.safetensors.index.json": {UPSCALE, RUN, CHECKPOINT},
    "data.safetensors": set(),
    "config.json": {UPSCALE, RUN, CHECKPOINT},
    "generation_config.json": {UPSCALE, RUN, CHECKPOINT},
    "vocab.json": {UPSCALE, RUN, CHECKPOINT},
    "tekken.json": {UPSCALE, RUN, CHECKPOINT},
    "preprocessor_config.json": {UPSCALE, RUN, CHECKPOINT},
    "additional_chat_templates/tool_use.jinja": {UPSCALE, RUN, CHECKPOINT},
    "additional_chat_templates/notes.txt": set(),
    # Names that an author of a base chose: upscale copies them, runs do not.
    "tokenizer_of_ours.json": {UPSCALE},
    "qwen.tiktoken": {UPSCALE},
    "SYSTEM_PROMPT.txt": {UPSCALE},
    "vocabulary.csv": {UPSCALE},
    ".tokenizer.json": set(),
    "LICENSE": {UPSCALE, RUN, CHECKPOINT},
    "LICENCE.md": {UPSCALE, RUN, CHECKPOINT},
    "COPYING": {UPSCALE, RUN, CHECKPOINT},
    "USE_POLICY.md": {UPSCALE, RUN, CHECKPOINT},
    "upscale.json": {UPSCALE, RUN, CHECKPOINT},
    "README.md": {UPSCALE, RUN, CHECKPOINT},
    "modeling_midus.py": {UPSCALE, RUN, CHECKPOINT},
    "midus_mine.py": set(),
    "train.py": set(),
    "memory_bank/hier-ffn/bank.json": {UPSCALE, RUN, CHECKPOINT},
    "memory_bank/hier-ffn/level-12.safetensors": {UPSCALE, RUN, CHECKPOINT},
    "memory_bank/hier-ffn/level-mine.safetensors": set(),
    "memory_bank/notes.txt": set(),
    "training_args.bin": {UPSCALE, RUN, CHECKPOINT},
    "trainer_state.json": {UPSCALE, CHECKPOINT},
    "optimizer.pt": {CHECKPOINT},
    "rng_state_1.pth": {CHECKPOINT},
    "adapter_model.safetensors": {CHECKPOINT},
    "block_states/0/touched.json": {CHECKPOINT},
    "block_states/0/level-1.safetensors": {CHECKPOINT},
    "block_states/0/.level-1.safetensors.midus-01234567.partial": {CHECKPOINT},
    "block_states/0/level-1.partial": set(),
    "train_config.yaml": {UPSCALE, RUN},
    "log.jsonl": {UPSCALE, RUN},
    ".log.jsonl.midus-01234567.partial": {RUN},
    ".log.jsonl.partial": set(),
    "log.jsonl.partial": set(),
    "runs/events.out.tfevents.1": {RUN},
    "runs/Nov21/events.out.tfevents.1": {RUN},
    "runs/events": set(),
    ".gitattributes": {UPSCALE},
    "notes.txt": set(),
}


def put(folder, name):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("x")


@pytest.mark.parametrize("name", WHOSE)
def test_whose_a_file_is(name, tmp_path):
    for who in (UPSCALE, RUN):
        put(tmp_path / who, name)
    put(tmp_path / "of-run" / "checkpoint-5", name)
    ours = {
        UPSCALE: not ownership.foreign_files(tmp_path / UPSCALE),
        RUN: not run_files.foreign_files(tmp_path / RUN),
        CHECKPOINT: not run_files.foreign_files(tmp_path / "of-run"),
    }
    assert {who for who, is_ours in ours.items() if is_ours} == WHOSE[name]
    removed = {RUN: remove_written(tmp_path / RUN, tmp_path / RUN / name)}
    removed[CHECKPOINT] = remove_written(tmp_path / "of-run", tmp_path / "of-run" / "checkpoint-5")
    assert {who for who, is_gone in removed.items() if is_gone} == WHOSE[name] - {UPSCALE}


def test_shards_that_an_index_names_are_weights_for_both_and_go_before_it(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "weights.safetensors"}}))
    for name in ("weights.safetensors", "others.safetensors"):
        (tmp_path / name).touch()
    assert ownership.foreign_files(tmp_path) == ["others.safetensors"]
    assert run_files.foreign_files(tmp_path) == ["others.safetensors"]
    remove_written(tmp_path, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["others.safetensors"]


def test_a_shard_that_a_link_leads_to_is_not_a_runs(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "weights.safetensors"}}))
    (tmp_path / "weights.safetensors").symlink_to(tmp_path / "elsewhere")
    assert run_files.foreign_files(tmp_path) == ["weights.safetensors"]
    assert not remove_written(tmp_path, tmp_path / "weights.safetensors")


@pytest.mark.parametrize(
    "text", ["no JSON", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {"a": []}}', "[" * 100_000]
)
def test_an_index_that_is_not_sound_names_nothing(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert indexed_weights(tmp_path) == frozenset()


def test_an_index_names_only_weights_that_lie_beside_it(tmp_path):
    names = ["one.safetensors", "../two.safetensors", "deep/three.safetensors", "notes.txt", 5]
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict(enumerate(names))}, default=str)
    )
    assert indexed_weights(tmp_path) == {"one.safetensors"}


def test_patterns_are_matched_part_by_part():
    assert is_of("a/b-12_.x", ("a/b-#@.x",)) and is_of("a/b", ("c",), ("*/b",))
    assert not is_of("a/b", ("*",)) and not is_of("a", ("*/b",)) and not is_of("b-.x", ("b-#.x",))
    assert (
        not is_of(".a", ("*",)) and is_of(".a", (".*",)) and not is_of("a.b", ("a?b",)) and not is_of("axb", ("a.b",))
    )
    assert globs(("a-#-*/@.py",)) == ["a-*-*/*.py"]


@pytest.mark.parametrize(
    "name",
    ["LlamaTokenizer", "Qwen2Tokenizer", "GemmaTokenizer", "GPT2Tokenizer", "T5Tokenizer", "TokenizersBackend"],
)
def test_the_files_of_tokenizers_are_known(name):
    files = tokenizer_class_from_name(name).vocab_files_names.values()
    assert files and all(is_of(file, TOKENIZER) for file in files)


def test_they_need_no_torch():
    modules = ", ".join(f"midus_hf.files.{name}" for name in ("manifest", "ownership", "run_files", "whole_folder"))
    code = f"import sys, {modules}; sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
