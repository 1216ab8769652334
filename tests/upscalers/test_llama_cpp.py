"""Results of dense methods as GGUF: llama.cpp computes what Transformers does."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import prompt
from transformers import AutoTokenizer

from material.smollm2 import smollm2_135m
from tests.docs.snippets import Block, take
from tests.upscalers.checkpoints import save_base, unverified, write_tensors
from tests.upscalers.contents import load, read_tensors
from tests.upscalers.methods import PROMISING
from upscalers.runs.upscale import upscale

# Where `make test-gguf` unpacks the source archive of llama-cpp-python.
CONVERTER = Path(sys.prefix) / "llama-cpp-python" / "vendor" / "llama.cpp" / "convert_hf_to_gguf.py"
VOCABULARY = 300
NEW_TOKENS = 24
SIXTH = {"num_hidden_layers": 6, "sliding_window_pattern": 6}
# Of logits up to 1: llama.cpp looks gelu up in a table of float16.
TOLERANCE = 5e-4
(RUN,) = take("docs/export.md", "python", having="from llama_cpp import")
(TYPED,) = take("docs/export.md", "python", having="from gguf import")


@pytest.fixture(scope="session")
def tokenizer_model(tmp_path_factory) -> bytes:
    """A small vocabulary of SentencePiece, which the converter takes for every family."""
    import sentencepiece

    path = tmp_path_factory.mktemp("tokenizer") / "small"
    texts = iter(["a few words of a text that nobody reads"] * 50)
    sizes = {"model_type": "bpe", "vocab_size": VOCABULARY, "hard_vocab_limit": False, "byte_fallback": True}
    trainer = sentencepiece.SentencePieceTrainer
    trainer.train(sentence_iterator=texts, model_prefix=str(path), minloglevel=2, **sizes)
    return path.with_suffix(".model").read_bytes()


@pytest.fixture
def tiny_base(tmp_path, tokenizer_model):
    def base(family: str, **changes: Any) -> Path:
        folder = save_base(tmp_path / f"{family}-base", family, vocab_size=VOCABULARY, **changes)
        (folder / "tokenizer.model").write_bytes(tokenizer_model)
        return folder

    return base


def upscaled(base: Path, output: Path, method: str, **request: Any) -> Path:
    """Upscale a base, and add noise to every matrix of the new layers; the method has zeroed some."""
    report = upscale(base=base, method=method, output=output, verify=False, **request)
    new = tuple(f"model.layers.{index}." for index in report.new_layer_indices)
    generator, tensors = torch.Generator().manual_seed(3), read_tensors(output)
    for name, tensor in tensors.items():
        if name.startswith(new) and tensor.dim() == 2:
            tensor += 0.05 * torch.randn(tensor.shape, generator=generator)
    write_tensors(output, tensors)
    return output


def convert(folder: Path, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, CONVERTER, folder, "--outfile", path, "--outtype", "f32"]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=path.parent)


def converted(folder: Path) -> Path:
    path = folder.parent / f"{folder.name}.gguf"
    done = convert(folder, path)
    assert done.returncode == 0, done.stderr[-4000:]
    return path


def computed_by_llama_cpp(path: Path, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Return the logits `[T, V]` of a prompt of T tokens, and the tokens that follow greedily."""
    from llama_cpp import GGML_TYPE_F32, Llama

    cache = {"type_k": GGML_TYPE_F32, "type_v": GGML_TYPE_F32}
    model = Llama(str(path), n_ctx=128, n_threads=1, logits_all=True, verbose=False, **cache)
    model.eval(tokens)
    logits = torch.tensor(model.scores[: len(tokens)])
    following = model.generate(tokens, temp=0.0, repeat_penalty=1.0)
    return logits, [next(following) for _ in range(NEW_TOKENS)]


def computed_by_transformers(folder: Path, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    model, ids = load(folder, torch.float32), torch.tensor([tokens])
    logits, settings = model(ids).logits[0], {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": []}
    made = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return logits, made[0, len(tokens) :].tolist()


def assert_same(folder: Path, path: Path, tokens: list[int] | None = None) -> None:
    tokens = tokens or prompt(batch=1)[0].tolist()
    actual, made = computed_by_llama_cpp(path, tokens)
    expected, generated = computed_by_transformers(folder, tokens)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)
    assert made == generated


PAIRS = [("llama", "llama-pro"), ("llama", "solar"), *(("qwen3", method) for method in PROMISING)]


@pytest.mark.parametrize(("family", "method"), PAIRS)
def test_dense_model_computes_the_same_in_llama_cpp(family, method, tiny_base, tmp_path):
    output = upscaled(tiny_base(family), tmp_path / "upscaled", method)
    assert_same(output, converted(output))


def run_block(block: Block) -> None:
    exec(compile(block.text, str(block), "exec"), {})


def test_moved_layers_of_gemma_need_their_types_in_the_file(tiny_base, tmp_path, monkeypatch):
    folder = upscaled(tiny_base("gemma3", **SIXTH), tmp_path / "gemma-3-1b-pro", "llama-pro", num_new_layers=3)
    plain = converted(folder)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(folder, plain)
    monkeypatch.chdir(tmp_path)
    run_block(TYPED)
    assert_same(folder, tmp_path / "gemma-3-1b-pro-typed.gguf")


def test_models_with_memory_are_refused(tiny_base, tmp_path):
    done = convert(unverified(tiny_base("llama"), tmp_path / "upscaled"), tmp_path / "upscaled.gguf")
    assert done.returncode != 0
    assert "Model MidusLlamaForCausalLM is not supported" in done.stderr
    assert not (tmp_path / "upscaled.gguf").exists()


@pytest.mark.material
def test_smollm2_with_new_layers_generates_the_same_in_llama_cpp(tmp_path, monkeypatch, capsys):
    folder = upscaled(smollm2_135m(), tmp_path / "smollm2-pro", "llama-pro", num_new_layers=3)
    text, tokenizer = "Fellow-citizens of the Senate", AutoTokenizer.from_pretrained(folder)
    tokens, path = tokenizer(text)["input_ids"], converted(folder)
    assert_same(folder, path, tokens)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    run_block(RUN)
    assert capsys.readouterr().out.startswith(tokenizer.decode(computed_by_transformers(folder, tokens)[1]))
