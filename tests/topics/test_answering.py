"""Prompts are answered with the blocks of the paths that a tree finds for them."""

import pytest
import torch
from evaluation.byte_models import byte_model, byte_tokenizer, save_byte_model
from topics.tiny_bert import WIDTH, save_tiny_bert
from topics.trees import random_tree
from transformers import AutoModelForCausalLM

from midus_hf.banks.memory_bank import MemoryBank
from midus_hf.topics.answering import FetchingPipeline
from midus_hf.topics.embedding import TextEmbedder
from midus_hf.topics.memory_retriever import MemoryRetriever
from upscalers.runs.upscale import upscale

PROMPTS = ["w1 w2 w3", "w40 w41", "w7 w8 w9 w10 w11"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose blocks act, of a tree of 3 by 9."""
    folder = tmp_path_factory.mktemp("answering")
    base = save_byte_model("llama", folder / "base", dtype=torch.float64)
    options = {"sizes": [4, 3], "branching": 3}
    upscale(base=base, method="hier-ffn", output=folder / "model", options=options, verify=False)
    layout = AutoModelForCausalLM.from_pretrained(folder / "model").banks.layouts["hier-ffn"]
    bank = MemoryBank(folder / "model" / "memory_bank" / "hier-ffn", layout)
    generator = torch.Generator().manual_seed(0)
    for level in (1, 2):
        for index in range(layout.blocks.nodes(level)):
            bank.write(level, index, 2 * torch.randn(layout.record_numel(level), generator=generator))
    return AutoModelForCausalLM.from_pretrained(folder / "model").eval()


@pytest.fixture(scope="module")
def retriever(tmp_path_factory):
    bert = save_tiny_bert(tmp_path_factory.mktemp("bert"))
    return MemoryRetriever(random_tree(3, 2, width=WIDTH), TextEmbedder(str(bert)))


def alone(model, prompt: str, path) -> str:
    tokens = torch.tensor([byte_tokenizer()(prompt).input_ids])
    with torch.no_grad():
        found = model.generate(tokens, memory_ids=torch.tensor([path]), max_new_tokens=6, do_sample=False)
    return prompt + byte_tokenizer().decode(found[0, tokens.shape[1] :], skip_special_tokens=True)


def test_each_prompt_is_answered_with_the_blocks_of_its_path(model, retriever):
    answers = FetchingPipeline(model, byte_tokenizer(), retriever)(PROMPTS, max_new_tokens=6, do_sample=False)
    paths = retriever.paths(PROMPTS).tolist()
    assert len({tuple(path) for path in paths}) > 1
    for prompt, path, answer in zip(PROMPTS, paths, answers, strict=True):
        assert answer["memory_ids"] == path
        assert answer["generated_text"] == alone(model, prompt, path)
        assert answer["seconds"].keys() == {"retrieve", "fetch", "generate"} and min(answer["seconds"].values()) > 0


def test_batches_answer_as_prompts_alone(model, retriever):
    paths = retriever.paths(PROMPTS)
    answers = FetchingPipeline(model, byte_tokenizer(), retriever)(
        PROMPTS, batch_size=2, max_new_tokens=6, do_sample=False
    )
    for prompt, path, answer in zip(PROMPTS, paths.tolist(), answers, strict=True):
        assert answer["memory_ids"] == path and answer["generated_text"] == alone(model, prompt, path)
    assert answers[0]["seconds"] == answers[1]["seconds"] != answers[2]["seconds"]


@pytest.mark.parametrize("size", [0, -1])
def test_batches_without_prompts_are_refused(size, model, retriever):
    with pytest.raises(ValueError) as raised:
        FetchingPipeline(model, byte_tokenizer(), retriever)(PROMPTS, batch_size=size)
    assert str(raised.value) == f"batch_size is {size}; expected 1 or more, or None for one batch of all prompts."


def test_one_prompt_may_be_given_and_left_out_of_its_answer(model, retriever):
    ask = FetchingPipeline(model, byte_tokenizer(), retriever)
    (whole,) = ask(PROMPTS[0], max_new_tokens=4, do_sample=False)
    (answer,) = ask(PROMPTS[0], max_new_tokens=4, do_sample=False, return_full_text=False)
    assert whole["generated_text"] == PROMPTS[0] + answer["generated_text"]


def test_blocked_nodes_are_not_fetched(model, retriever):
    ask = FetchingPipeline(model, byte_tokenizer(), retriever)
    node = retriever.paths(PROMPTS[:1])[0, 0].item()
    (answer,) = ask(PROMPTS[0], blocked=[(1, node)], max_new_tokens=2)
    assert answer["memory_ids"][0] != node


def test_a_blank_prompt_is_answered_with_the_generic_memory_alone(model, retriever):
    ask = FetchingPipeline(model, byte_tokenizer(), retriever)
    blank, other = ask(["", PROMPTS[0]], max_new_tokens=4, do_sample=False)
    assert blank["memory_ids"] == [-1, -1] and blank["generated_text"]
    assert other["generated_text"].startswith(PROMPTS[0])
    tokenizer = byte_tokenizer()
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    with torch.no_grad():
        found = model.generate(
            torch.tensor([[first]]), memory_ids=torch.tensor([[-1, -1]]), max_new_tokens=4, do_sample=False
        )
    assert blank["generated_text"] == tokenizer.decode(found[0, 1:], skip_special_tokens=True)
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(
        ValueError, match="a prompt has no token, and the tokenizer has neither a first token nor a last"
    ):
        FetchingPipeline(model, tokenizer, retriever)([""], max_new_tokens=1, pad_token_id=0)


def test_models_without_banks_and_other_trees_are_refused(model, retriever):
    with pytest.raises(ValueError, match=r"this llama model fetches no blocks; .* Use transformers\.pipeline"):
        FetchingPipeline(byte_model("llama"), byte_tokenizer(), retriever)
    other = MemoryRetriever(random_tree(3, 3, width=WIDTH), retriever.embedder)
    with pytest.raises(ValueError, match="by a tree of 2 levels of 3, and the retriever has 3 levels of 3"):
        FetchingPipeline(model, byte_tokenizer(), other)
