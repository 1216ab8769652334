"""What Transformers serves: `transformers serve`, pipelines, and requests in one row."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from composite import composite_model
from models.cases import CASES
from models.memory_models import chapter_model
from models.upscaled import upscaled_model
from pairs import by_default, in_turn
from tiny import WINDOW, logits, save_tiny_tokenizer, tiny_model
from transformers import ContinuousBatchingConfig, GenerationConfig, pipeline
from transformers.cli.serving import model_manager
from transformers.pipelines import base

from midus_hf.models import FAMILIES
from midus_hf.models.families import COMPOSITE_FAMILIES
from upscalers.runs.upscale import upscale


@pytest.fixture
def serve() -> Iterator[Callable[[Path], Any]]:
    """Load a model as `transformers serve --device cpu` does."""
    manager = model_manager.ModelManager(device="cpu")
    yield lambda folder: manager.load_model_and_processor(manager.process_model_name(str(folder)))[0]
    manager.shutdown()


def saved(family: str, folder: Path) -> Any:
    model = upscaled_model(family)
    model.save_pretrained(folder)
    save_tiny_tokenizer(folder)
    return model


def test_server_finds_the_classes_of_every_family(native_family, serve, tmp_path):
    model, result = saved(native_family, tmp_path), serve(tmp_path)
    assert type(result) is type(model)
    assert type(result) in FAMILIES.values()
    assert torch.equal(logits(result), logits(model))
    if native_family == "llama":  # a composite model too
        composite_model("llava").save_pretrained(tmp_path / "base")
        upscale(base=tmp_path / "base", method="midus-hml", output=tmp_path / "upscaled", options={"n": 8, "k": 3})
        save_tiny_tokenizer(tmp_path / "upscaled")
        assert type(serve(tmp_path / "upscaled")) is COMPOSITE_FAMILIES["llava"]


def test_pipeline_continues_a_text_as_generate_does(family, tmp_path, monkeypatch):
    printed: list[str] = []
    monkeypatch.setattr(base.logger, "error", printed.append)  # of a class that the pipeline does not know
    model, greedy = saved(family, tmp_path), {"max_new_tokens": 6, "do_sample": False}
    texts = ["word5 word9", "word7 word11 word20"]
    generator = pipeline("text-generation", model=str(tmp_path), device="cpu")
    assert type(generator.model) is type(model)
    assert not printed
    for text, (result,) in zip(texts, generator(texts, return_full_text=False, **greedy), strict=True):
        ids = generator.tokenizer(text, return_tensors="pt").input_ids
        new = model.generate(ids, **greedy)[0, ids.shape[1] :]
        assert result["generated_text"] == generator.tokenizer.decode(new)
        assert len(new) == 6


NEW = 8
# Requests of several lengths, some longer than a sliding window. All fit into one row.
LENGTHS = (5, 2 * WINDOW, 9, 3 * WINDOW)
# Small: by default the cache takes most of the machine's memory.
SMALL = {"num_blocks": 16, "max_batch_tokens": 64}
USUAL = ["midus-hml", "midus-pkm", "linear", "token behind layers", "ultramem own", "ultramem skip", "all fetched"]
READ_THE_DEPTH = [name for name in CASES if name.startswith("depth")]
LOOK_BACK = ("chunk", "ngram", "ngram behind layers", *READ_THE_DEPTH)
LOOK_AT_ONE_TOKEN = [name for name in CASES if name not in LOOK_BACK]
# From this version on, continuous batching runs attention "sdpa" as any pass does.
SDPA_IS_ITSELF = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)


def requests() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 128, (length,), generator=generator).tolist() for length in LENGTHS]


def one_by_one(model: Any) -> list[list[int]]:
    tokens = (torch.tensor([request]) for request in requests())
    return [model.generate(row, max_new_tokens=NEW, do_sample=False)[0, row.shape[1] :].tolist() for row in tokens]


def in_one_row(model: Any, **arguments: Any) -> list[list[int]]:
    results = model.generate_batch(
        requests(),
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(**SMALL),
        **arguments,
    )
    assert [result.error for result in results.values()] == [None] * len(LENGTHS)
    return [result.generated_tokens for result in results.values()]


def with_attention(model: Any, name: str) -> Any:
    model.set_attn_implementation(name)
    return model


@pytest.mark.parametrize(("case", "attention"), in_turn(LOOK_AT_ONE_TOKEN, ["sdpa", "eager"], kept=USUAL))
def test_requests_get_the_tokens_that_they_get_one_by_one(family, case, attention, tmp_path):
    attention = "eager" if family == "gemma2" else attention  # it has no sdpa
    model = with_attention(CASES[case].model(family, tmp_path, torch.float32), attention)
    expected = one_by_one(model)
    assert in_one_row(model) == expected
    if not CASES[case].fetches:
        base = with_attention(tiny_model(family), attention)
        assert expected != one_by_one(base), "the memories change nothing"


@pytest.mark.parametrize("case", by_default(READ_THE_DEPTH[:2], READ_THE_DEPTH))
def test_depth_needs_attention_with_a_log_sum_exp(case, tmp_path):
    model = with_attention(CASES[case].model("qwen3", tmp_path, torch.float32), "sdpa")
    expected = one_by_one(model)
    assert expected != one_by_one(tiny_model("qwen3"))
    if SDPA_IS_ITSELF:
        assert in_one_row(model) == expected
    for attention in ("eager",) if SDPA_IS_ITSELF else ("sdpa", "eager"):
        message = rf"'paged\|{attention}' exposes no log-sum-exp, .*; expected `generate`, or"
        with pytest.raises(ValueError, match=message):
            in_one_row(with_attention(model, attention))


REFUSED = {
    **dict.fromkeys(("chunk", "sequence"), "keeps nothing for the memory 'chapters', .* expected `generate`, or"),
    **dict.fromkeys(("memory_ids", "memory_blocks"), "is given, .* the same blocks; expected `generate`, or none"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.items())
def test_requests_in_one_row_are_refused_with(given, message, tmp_path):
    if given in ("chunk", "sequence"):
        model, arguments = chapter_model(routing=given), {}
    else:
        model = CASES["hier-ffn"].model("llama", tmp_path)
        arguments, message = {given: CASES["hier-ffn"].given(len(LENGTHS))["memory_ids"]}, f"{given} {message}"
    with pytest.raises(ValueError, match=message):
        in_one_row(model, **arguments)
