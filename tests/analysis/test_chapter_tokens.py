"""The tokens nearest to a memory token are those that the model would predict if it were all that is added."""

import pytest
import torch
from analysis.chapter_models import LAYERS, TOKENS, routed_model
from peft import LoraConfig, get_peft_model
from training.tiny_run import tiny_tokenizer

from midus_hf.analysis.chapters.tokens import nearest_tokens


def memory_of(model, layer=0):
    return model.model.layers[layer].memories["chapters"]


@pytest.mark.parametrize("options", [{}, {"kv_heads": 2}, {"bank_width": 16}, {"normalise": False}])
def test_what_a_memory_token_adds_is_what_a_token_gets_that_attends_to_it_alone(options):
    model = routed_model(memory_tokens=6, shared_chapters=0, k=1, weighting="paper", **options).double()
    memory, tables = memory_of(model), {"bank": model.model.memory_tables["chapters"]["0"].bank}
    read = torch.randn(1, 9, 32, dtype=torch.float64)
    chosen = memory.route(read).chosen[:, 0]
    assert len(set(chosen.tolist())) > 1
    added = memory.token_outputs(torch.arange(6), tables=tables)
    assert added.shape == (6, 1, 32)
    torch.testing.assert_close(memory(read, tables=tables)[0], added[chosen, 0])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_nearest_tokens_are_the_heads_best(family):
    model = routed_model(family)
    near = nearest_tokens(model, tiny_tokenizer(), chapters=[4, 1], top=3, each_row=True)
    assert [(of_layer.layer, of_layer.chapter) for of_layer in near] == [(x, c) for x in LAYERS for c in (4, 1)]
    of_chapter = near[2]
    tables = {"bank": model.model.memory_tables["chapters"]["0"].bank}
    with torch.no_grad():
        added = memory_of(model, 2).token_outputs(torch.tensor([4]), tables=tables)[0]
        logits = model.lm_head(model.model.norm(added))
    logits -= logits.mean(-1, keepdim=True)
    assert of_chapter.norm == pytest.approx(added.norm(dim=-1).mean().item())
    assert [token.id for token in of_chapter.tokens] == logits.mean(0).topk(3).indices.tolist()
    assert [token.logit for token in of_chapter.tokens] == pytest.approx(
        logits.mean(0).topk(3).values.tolist(), rel=1e-5
    )
    assert len(of_chapter.rows) == TOKENS
    for row, of_row in zip(of_chapter.rows, logits, strict=True):
        assert [token.id for token in row] == of_row.topk(3).indices.tolist()
    words = [token for token in of_chapter.tokens if token.id > 2]
    assert words and all(token.token == f"w{token.id}" for token in words)


def test_a_memory_that_adds_nothing_is_near_to_nothing():
    model = routed_model()
    memory_of(model).output_projection.weight.data.zero_()
    first, *_ = nearest_tokens(model, tiny_tokenizer(), chapters=[1], layers=[0])
    assert (first.norm, first.tokens, first.rows) == (0, [], [])


def test_all_chapters_of_a_wrapped_model_are_probed():
    usual = nearest_tokens(routed_model(), tiny_tokenizer())
    assert len(usual) == len(LAYERS) * 6 and all(len(near.tokens) == 10 for near in usual)
    lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["memories.chapters"], task_type="CAUSAL_LM")
    assert nearest_tokens(get_peft_model(routed_model(), lora), tiny_tokenizer()) == usual


def test_a_number_of_tokens_below_one_is_refused():
    with pytest.raises(ValueError, match=r"top is 0; expected at least 1\."):
        nearest_tokens(routed_model(), tiny_tokenizer(), top=0)
