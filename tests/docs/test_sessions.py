"""Blocks of a page run in order, in one folder, with tiny models in place of those that it names."""

import re
import runpy
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from commands.installed import main_of
from compare.small_comparison import compare_in_this_process
from evaluation.byte_models import byte_tokenizer, save_byte_model
from evaluation.questions import write_questions
from models.fresh_process import run_python
from pairs import by_default
from peft import LoraConfig, get_peft_model
from sft.tiny_chats import write_rows
from topics.tiny_bert import save_tiny_bert
from training.tiny_run import document, write_corpus
from transformers import AutoModelForCausalLM, TrainingArguments, default_data_collator

from midus_hf.config.yaml_options import from_mapping, read_yaml
from midus_hf.training.arguments import TrainArguments
from scripts.anatomy.tiny import tiny_model
from tests.docs.shell import Program, run_shell
from tests.docs.snippets import ROOT, RUN_LANGUAGES, Block, take
from tests.upscalers.real_configs import LLAMA_3_1_8B, LLAMA_3_2_1B, write_config
from upscalers.runs.upscale import upscale

SHORT = "--max_steps 2 --sequence_length 32 --per_device_train_batch_size 2"
# What stands on every page in place of its base, recipes and numbers, so that a run takes a second.
SMALLER = {
    r"HuggingFaceTB/SmolLM2-135M-Instruct": "base", r"configs/train/demo\.yaml": rf"configs/train/demo.yaml {SHORT}",
    r"configs/sft/demo\.yaml": "configs/sft/demo.yaml --max_steps 2 --max_length 64 --per_device_train_batch_size 2",
    r"--max-tokens \d+": "--max-tokens 64", r"--sequence-length \d+": "--sequence-length 32", r"--limit \d+": "--limit 2",
    r"max_new_tokens=\d+": "max_new_tokens=4",
}  # fmt: skip
# What a page's name of a model is replaced by.
SMALL_BASE = {"HuggingFaceTB/SmolLM2-135M-Instruct": "small-base"}
LLAMA_CONFIG = {"meta-llama/Llama-3.2-1B": "llama-3.2-1b"}
SMALL_LLAMA = {"meta-llama/Llama-3.2-1B": "small-base"}
# Commands whose results no later block reads are planned: tests/upscalers has tests that run their options.
PLANNED = {"upscale --base": "upscale --dry-run --base"}
# Keys that every recipe of `midus train` needs; a page shows other keys.
EVERY_RUN = {"model_name_or_path": "base", "output_dir": "out", "corpus": "texts"}


@dataclass(frozen=True)
class Session:
    """The models, files and names with which the blocks of a page run. Other test modules run other blocks.

    By a block of YAML without a name the base is upscaled if it names a method; else it is read as keys of `midus train`.
    """

    replace: dict[str, str] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)  # names, and the method that makes each
    files: tuple[str, ...] = ()  # names of the page's blocks of YAML, in order
    names: Callable[[], dict[str, Any]] = dict  # what blocks of Python take as defined
    languages: tuple[str, ...] = RUN_LANGUAGES
    elsewhere: tuple[str, ...] = ()
    is_small: bool = True


def load(folder: str | Path) -> dict[str, Any]:
    return {"model": AutoModelForCausalLM.from_pretrained(folder).eval(), "tokens": torch.arange(3, 27)[None]}


def trainer_names() -> dict[str, Any]:
    row = list(range(3, 27))
    return {
        "model": AutoModelForCausalLM.from_pretrained("smollm2-hml", dtype="float32"),
        "arguments": TrainingArguments("runs", max_steps=2, use_cpu=True, save_strategy="no", report_to=[]),
        "dataset": [{"input_ids": row, "labels": row}] * 16,
        "collator": default_data_collator,
    }


def datatrove_names() -> dict[str, Any]:
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter

    Path("documents").mkdir()
    shutil.copy("corpus.jsonl", "documents")
    writer = JsonlWriter("assigned", compression=None, expand_metadata=True)
    return {"AutoModelForCausalLM": AutoModelForCausalLM, "reader": JsonlReader("documents"), "writer": writer}


SMOLLM2_HML = {"smollm2-hml": "midus-hml"}
METHODS: dict[str, Any] = {
    "midus-hml": {"num_new_layers": 2, "options": {"n": 8, "k": 2}}, "moda": {}, "hier-ffn": {"options": {"sizes": [4, 3, 2, 0]}},
}  # fmt: skip
SESSIONS = {
    "README.md": Session(),
    "docs/quickstart.md": Session(),
    "docs/upscale.md": Session({
        **SMALL_LLAMA, "strip DIR --output DIR2": "strip smollm2-hml --output stripped",
        "shuffle DIR --output DIR2": "shuffle smollm2-hml --output shuffled", "DIR": "smollm2-hml",
    }, files=("",)),
    "docs/train.md": Session(
        {"TEXTS": "texts", "MODEL": "smollm2-hml", "DIR": f"trained {SHORT}"}, SMOLLM2_HML, languages=("sh",)
    ),
    "docs/sft.md": Session({
        '--model "$BASE"': '--max_steps 2 --max_length 64 --model "$BASE"', "CHATS.jsonl": "instructions.jsonl",
        '"tuned"': '"tuned-again"', "max_length=1024": "max_length=64",
    }, models=SMOLLM2_HML),
    "docs/recipes.md": Session({
        **SMALL_LLAMA, "TEXTS": f"texts {SHORT}", "HELD_OUT": "held_out --max-tokens 64 --sequence-length 32",
        "--save_steps 100": "--save_steps 1",
        "CHATS.jsonl": "instructions.jsonl --max_steps 2 --max_length 64 --per_device_train_batch_size 2",
        'gateway?"': 'gateway?" --max-new-tokens 2',
        "--base BASE": "--base base", "PACKAGE": "json",
    }, models={"pretrained": "midus-hml"}),
    "docs/trainer.md": Session({
        "--max_steps 50": "--max_steps 2 --sequence_length 32 --use_cpu true --report_to none", "chats.jsonl": "instructions.jsonl",
        "--max_length 1024 --bf16": "--max_length 64 --max_steps 2 --use_cpu true --report_to none",
    }, names=trainer_names, elsewhere=("set_trainable(model)",)),
    "docs/peft.md": Session({
        "TEXTS --model MODEL": f"texts --model upscaled --bf16 false {SHORT}",
        "HuggingFaceTB/SmolLM2-135M-Instruct": "small-base",
    }, models={"upscaled": "midus-hml"}, files=("",)),
    "docs/serve.md": Session(models=SMOLLM2_HML),
    "docs/export.md": Session(
        models={"smollm2-hml": "midus-hml"},
        names=lambda: {**load("smollm2-hml"), "torch": torch},
        elsewhere=("from llama_cpp import", "from gguf import")),
    "docs/evaluate.md": Session({
        "MODEL [MODEL ...]": "base --max-tokens 64 --sequence-length 32", "MODEL ...": "base --limit 2", "MODEL": "base",
        "FILE_OR_FOLDER": "held_out", "--tasks facts": "--tasks facts --limit 2",
    }, files=("tasks/ports.yaml",)),
    "docs/trust.md": Session(replace={"FOLDER": "model"}, models={"model": "hier-ffn"}),
    "docs/families.md": Session(replace={"Qwen/Qwen3-30B-A3B": "tiny-qwen3-moe"}),
    "docs/plan.md": Session(replace=LLAMA_CONFIG),
    "docs/glossary.md": Session({
        "--base BASE": "--base base", "--at-least 0.9": "--at-least 0", "--text deleted=deleted.jsonl": "--text deleted=held-out.txt",
    }),
    "docs/benchmarks.md": Session(replace={"FOLDER_OR_HUB_ID": "base"}),
    "docs/look-inside.md": Session({
        "addresses=...": "addresses=addresses/", "articles=...": "articles=articles.jsonl", "heads smollm2": "heads base",
        "--layer 11": "--max-tokens 64 --layer 3",
    }, models={"trained": "midus-hml", "trained-moda": "moda"},
        names=lambda: {**load("trained"), "documents": [document(20, 1)], "tokenizer": byte_tokenizer()}),
    "docs/documents.md": Session({
        "--model BASE --output adapted": f"--model base --output adapted {SHORT}",
        "--num-new-layers 10": "--num-new-layers 2", "notes/": "texts", "--num_train_epochs 1\n": f"{SHORT}\n",
        '"Which command gives the base back?"': '"Which command gives the base back?" --plain --max-new-tokens 2'}),
    "docs/compare.md": Session({
        **SMALL_BASE, "num_new_layers: 10": "num_new_layers: 2", "plants/, max_steps: 200": "texts, max_steps: 2",
        "sequence_length: 256": "sequence_length: 32", "plants-held-out.txt": "held-out.txt", "other-plants.txt": "addresses",
        "wiki.txt": "others.jsonl", "code.txt": "code.jsonl", "limit: 200": "limit: 1", "[1.0e-3, 3.0e-4, 1.0e-4]": "[1.0e-3]",
        "[1.0e-3, {learning_rate: 1.0e-3, value_learning_rate: 3.0e-2}]": "[1.0e-3]",
        "seeds: [0, 1, 2]": "seeds: [0]\ncontrols: false", "num_new_layers: 3": "num_new_layers: 2",
        "trainable: [10, 20]": "trainable: [1, 2]", "[1.0e-4, 3.0e-5, 1.0e-5]": "[1.0e-4]",
        # The notebook on comparisons runs other variants.
        "compare.yaml   ": "compare.yaml --set 'variants={lora: {train: {adapters: {r: 32, lora_alpha: 64}}}}'   ",
    }, files=("compare.yaml",)),
    "docs/banks.md": Session({
        **SMALL_BASE, "sentence-transformers/all-MiniLM-L6-v2": "bert", "tasks=100": "tasks=1",
        "--method hier-ffn": "--method hier-ffn --set sizes=4,3,2,0",
        "max_steps: 1000": "max_steps: 2\nsequence_length: 32\nbf16: false",
        "MODEL --text texts.jsonl --retriever": "outputs/hier --text corpus.jsonl --retriever",
        "MODEL --text texts.jsonl --path": "outputs/hier --text assigned.jsonl --path", "MODEL": "outputs/hier", "TREE": "tree",
    }, files=("recipe.yaml",), names=lambda: {"tokenizer": byte_tokenizer(), **datatrove_names()}),
    **{
        f"docs/methods/{page}.md": Session(replace={**LLAMA_CONFIG, **PLANNED})
        for page in ("hierarchical", "midus", "moda", "ultramem-v2")
    },
    "docs/methods/README.md": Session(replace=SMALL_LLAMA),
    "docs/methods/moc.md": Session(
        {**SMALL_LLAMA, "--method moc --set": "--method moc --dry-run --set", "20000": "64"}
    ),
    "docs/methods/engram.md": Session({
        "upscale --base meta-llama/Llama-3.2-1B": "upscale --dry-run --base small-base", "--base BASE": "--base base",
        "TEXTS": "texts", "NOTES ARTICLES": "held-out.txt questions/train/001.txt", "ARTICLES": "held-out.txt",
        "OTHERS": "texts", "--max_steps 200": SHORT, "NAMES": "texts", "layers=[4,8,12]": "layers=[0,1]",
        "--value_learning_rate 0.1": f"--value_learning_rate 0.1 {SHORT}"}),
    "docs/methods/packs.md": Session(replace={"--base BASE": "--base base", "ARTICLES": "held-out.txt"}),
    "docs/methods/deus.md": Session(replace={**PLANNED, **LLAMA_CONFIG, "google/gemma-2-2b": "tiny-gemma-2"}),
    "docs/methods/lesa.md": Session(
        {**SMALL_LLAMA, "--method lesa --set": "--method lesa --dry-run --set", "device=cuda": "device=cpu"}
    ),
    "docs/methods/llama-pro.md": Session({**PLANNED, **LLAMA_CONFIG, "meta-llama/Llama-2-7b-hf": "llama-3.1-8b"}),
    "docs/methods/solar.md": Session(replace={**PLANNED, "meta-llama/Llama-3.1-8B": "llama-3.1-8b"}),
}  # fmt: skip
# Pages that take long, and run commands whose results other tests have: they run with the product.
LONG = {f"docs/{page}.md" for page in ("banks", "compare", "evaluate", "export", "look-inside", "peft", "serve")}
LONG |= {f"docs/methods/{page}.md" for page in ("deus", "engram", "lesa", "llama-pro", "moc")}
# A model is loaded where this package is not imported: in a process of its own.
SHARED = [take(page, "python", having="trust_remote_code") for page in ("docs/serve.md", "README.md")]
BLOCKS = {page: take(page, *session.languages, without=session.elsewhere) for page, session in SESSIONS.items()}


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("room")
    save_byte_model("llama", folder / "base", num_hidden_layers=10)
    save_byte_model("llama", folder / "small-base", num_hidden_layers=4)
    save_tiny_bert(folder / "bert")
    save_byte_model("gemma2", folder / "tiny-gemma-2", num_hidden_layers=6)
    tiny_model("qwen3_moe").save_pretrained(folder / "tiny-qwen3-moe")
    adapted = get_peft_model(load(folder / "small-base")["model"], LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(folder / "ADAPTER")
    write_config(folder / "llama-3.2-1b", LLAMA_3_2_1B)
    write_config(folder / "llama-3.1-8b", LLAMA_3_1_8B)
    for name in ("texts", "held_out", "addresses", "questions/train"):
        write_corpus(folder / name, documents=12)
    (folder / "held-out.txt").write_text(document(60, 99))
    for number, name in enumerate(("corpus", "others", "articles", "code", "chats", "facts")):
        seeds = range(30 * number, 30 * number + (12 if number else 30))  # the first makes a tree
        write_rows(folder / f"{name}.jsonl", [{"text": document(20, seed), "topic": "ab"[seed % 2]} for seed in seeds])
    chats = [{"prompt": document(4, seed), "completion": " " + document(4, seed + 99)} for seed in range(8)]
    write_rows(folder / "instructions.jsonl", chats)
    write_rows(folder / "questions.jsonl", [{"question": "The Kestrel gateway?", "answer": document(2, 1)}])
    write_rows(folder / "glossary.jsonl", [{"name": "Kestrel gateway", "text": document(6, 1)}])
    write_questions(folder / "questions")
    names = [{"name": name, "names": [name], "number": 1} for name in ("w5", "w7", "w9", "w11", "w13")]
    write_rows(folder / "questions" / "atomic_numbers.jsonl", names)
    for name in ("configs", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture(scope="module")
def upscaled(room) -> Callable[[str], Path]:
    """Return a function from a name in `METHODS` to a folder of a base that is upscaled so."""
    made: dict[str, Path] = {}

    def model(name: str) -> Path:
        if name not in made:
            made[name] = room.parent / name
            upscale(base=room / "small-base", method=name, output=made[name], verify=False, **METHODS[name])
        return made[name]

    return model


def installed(name: str) -> Program:
    def run(arguments: list[str]) -> Any:
        sys.argv = [name, *arguments]
        return main_of(name)()

    return run


def python(arguments: list[str]) -> int:
    is_module = arguments[0] == "-m"
    sys.argv = arguments[is_module:]
    (runpy.run_module if is_module else runpy.run_path)(sys.argv[0], run_name="__main__")
    return 0


# What stands in a session's folder in place of what `python -m material` fetches.
MATERIAL = {
    "smollm2": "base", "minilm": "bert", "addresses/train": "texts", "addresses/held_out": "held_out", "glosses": "corpus.jsonl",
    **dict.fromkeys(("elements", "factbook", "benchmarks"), "questions"),
}  # fmt: skip


def python_without_material(arguments: list[str]) -> int:
    """Run a script or a module; in place of fetched material, print a path of the session's folder."""
    if arguments[:2] != ["-m", "material"]:
        return python(arguments)
    print(MATERIAL[arguments[2]])
    return 0


PROGRAMS: dict[str, Program] = {name: installed(name) for name in ("upscale", "midus")}
PROGRAMS["python"] = python_without_material


def replaced(text: str, session: Session) -> str:
    for piece, instead in session.replace.items():
        text = text.replace(piece, instead)
    for pattern, instead in SMALLER.items() if session.is_small else ():
        text = re.sub(pattern, instead, text)
    return text


def run_blocks(blocks: list[Block], session: Session, folder: Path, programs: dict[str, Program]) -> None:
    """Run blocks in order, recipes first; the shell keeps variables, and Python names."""
    recipes = [block for block in blocks if block.language == "yaml"]
    assert len(recipes) == len(session.files), "the session names a file for each block of YAML"
    for block, name in zip(recipes, session.files, strict=True):
        text = replaced(block.text, session)
        if name:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        elif "method" in read_yaml(text, name):
            upscale(**read_yaml(text, name), output=folder / "upscaled-by-recipe")
        else:
            from_mapping(TrainArguments, {**EVERY_RUN, **read_yaml(text, name)})
    names: dict[str, Any] = {"__name__": "__main__"}
    variables = ""
    for block in blocks:
        if block.language == "python":
            if len(names) == 1:
                names.update(session.names())
            exec(compile(replaced(block.text, session), str(block), "exec"), names)
        elif block.language != "yaml":
            script = replaced("\n".join(block.commands), session)
            done = run_shell(f"{variables}\n{script}\n", folder, programs)
            assert done.status == 0, f"{block}: {done.err}{done.out}"
            variables = "\n".join([variables, *re.findall(r"^[A-Z_]+=.*$", script, flags=re.MULTILINE)])
            written = "\n".join(line for line in script.splitlines() if "--dry-run" not in line)
            for output in map("".join, re.findall(r"--output(?:_dir)? (\S+)|output_dir=(\S+)", written)):
                assert (folder / output).exists(), f"{block} wrote no {output}"


@pytest.mark.parametrize("page", by_default(SESSIONS.keys() - LONG, SESSIONS))
def test_page_blocks_run_in_order(page, room, upscaled, tmp_path, monkeypatch):
    session, folder = SESSIONS[page], shutil.copytree(room, tmp_path / "room", symlinks=True)
    for name, method in session.models.items():
        shutil.copytree(upscaled(method), folder / name)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("COLUMNS", "200")
    compare_in_this_process(monkeypatch)
    run_blocks(BLOCKS[page], session, folder, PROGRAMS)


def test_replaced_pieces_are_on_their_page():
    texts = {page: "".join(block.text for block in blocks) for page, blocks in BLOCKS.items()}
    pieces = [(page, piece) for page in texts for piece in SESSIONS[page].replace]
    assert [(page, piece) for page, piece in pieces if piece not in texts[page]] == []


@pytest.mark.parametrize("page", ["docs/upscale.md", "docs/plan.md"])
def test_page_shows_what_a_dry_run_prints(page, room, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    (block,) = [block for block in BLOCKS[page] if block.language == "console"]
    done = run_shell(replaced("\n".join(block.commands), Session(LLAMA_CONFIG)), room, PROGRAMS)
    _, *shown = [line.split() for line in block.text.splitlines()]
    printed = [line.split() for line in done.out.splitlines()]
    assert shown
    assert [line for line in shown if line not in printed] == []


@pytest.mark.parametrize("blocks", SHARED, ids=lambda blocks: blocks[0].page)
def test_shared_model_loads_without_the_package(blocks, upscaled, tmp_path):
    for name in ("smollm2-hml", "trained"):
        shutil.copytree(upscaled("midus-hml"), tmp_path / name)
    (block,) = blocks
    program = f"{block.text}\nprint(type(model).__name__)"
    assert run_python(program, tmp_path, package_present=False).splitlines()[-1] == "MidusLlamaForCausalLM"


@pytest.mark.material
@pytest.mark.product
def test_quickstart_runs_on_the_base_it_fetches(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.syspath_prepend(ROOT)
    page = "docs/quickstart.md"
    run_blocks(BLOCKS[page], Session(is_small=False), tmp_path, {**PROGRAMS, "python": python})
    assert (tmp_path / "layers.png").exists()
