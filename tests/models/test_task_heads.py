"""Classifiers and question-answering heads over memories of every kind, built in memory."""

import pytest
import torch
from models.cases import CASES
from models.chapter_models import chapter_model
from models.hosting import host_config
from pairs import in_turn
from tiny import NATIVE_FAMILIES, prompt, tiny_model
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import set_seed

from midus_hf.models.families import FAMILIES, HEADS

KINDS = tuple(HEADS)
LABELS = {
    "ForSequenceClassification": {"labels": torch.tensor([2, 0])},
    "ForTokenClassification": {"labels": torch.arange(48).reshape(2, 24) % 3},
    "ForQuestionAnswering": {"start_positions": torch.tensor([1, 4]), "end_positions": torch.tensor([3, 4])},
}


def head_of(kind, causal, **changes):
    """Return the head of a kind over the weights of a causal language model that hosts memory, with three labels."""
    config = type(causal.config)(**{**causal.config.to_dict(), "num_labels": 3, "pad_token_id": 0, **changes})
    set_seed(5)
    head = HEADS[kind][0].from_config(config, dtype=causal.dtype)
    head.model.load_state_dict(causal.model.state_dict())
    if kind != "ForSequenceClassification":  # bias
        torch.nn.init.normal_(layer_of(head).bias)
    return head.eval()


def layer_of(head):
    """Return the layer that reads the stack's last hidden states."""
    return head.qa_outputs if hasattr(head, "qa_outputs") else head.score


def logits_of(output):
    """Return the logits of a head as one tensor."""
    if "logits" in output:
        return output.logits
    return torch.stack((output.start_logits, output.end_logits), -1)


def kinds_of(family):
    """Return the kinds of heads that a family of the table has."""
    return FAMILIES[NATIVE_FAMILIES[family].config_class.model_type].config_class.head_kinds


@pytest.mark.filterwarnings("error:routing is 'prompt'")
@pytest.mark.parametrize(("case", "kind"), in_turn(CASES, KINDS))
def test_a_head_reads_what_the_stack_computes_from_all_inputs_of_memories(case, kind, tmp_path):
    """Compare with the head's own layer on the stack of the language model, which got the same inputs."""
    causal = CASES[case].model("llama", tmp_path)
    head = head_of(kind, causal)
    if CASES[case].fetches:
        head.banks._open = causal.banks._open
    tokens = prompt()
    inputs = CASES[case].of_pass(tokens, 9)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    with torch.no_grad():
        hidden = causal.model(tokens, attention_mask=mask, **inputs).last_hidden_state
        expected = layer_of(head)(hidden)
        read = logits_of(head(tokens, attention_mask=mask, **inputs))
        whole = {"prompt_mask": torch.ones_like(mask)} if CASES[case].reads_prompt else {}
        others = causal.model(tokens, attention_mask=mask, **whole).last_hidden_state
    assert torch.equal(read, expected[:, -1] if kind == "ForSequenceClassification" else expected)
    assert torch.equal(hidden, others) == (not inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_a_family_is_the_head_of_its_base_where_memories_do_nothing(family, kind):
    if kind not in kinds_of(family):
        pytest.skip("transformers has no such head of the family")
    native = tiny_model(family)
    set_seed(3)
    base = HEADS[kind][0].from_config(native.config.__class__(**{**native.config.to_dict(), "pad_token_id": 0}))
    base = base.eval()
    entry = {"type": "chapters", "name": "chapters", "site": "behind-attention", "layers": [1, 3]}
    entry |= {"memory_tokens": 24, "chapters": 12, "k": 2, "chunk_size": 3}
    head = HEADS[kind][0].from_config(host_config(base.config, [entry])).eval()
    assert type(head).__name__ == f"{FAMILIES[native.config.model_type].__name__.removesuffix('ForCausalLM')}{kind}"
    weights = {name.replace("transformer.", "model.", 1): tensor for name, tensor in base.state_dict().items()}
    missing = head.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys and all(".memor" in name for name in missing.missing_keys)
    tokens = prompt()
    with torch.no_grad():
        assert torch.equal(logits_of(head(tokens)), logits_of(base(tokens)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_losses_of_routers_join_the_loss_in_training(kind):
    """Add to the loss what the causal language model adds of the same routers."""
    causal = chapter_model(routing="chunk")
    head, tokens = head_of(kind, causal, classifier_dropout=0.0), prompt()
    plain = head(tokens, **LABELS[kind])
    assert "aux_loss" not in plain
    trained = head.train()(tokens, **LABELS[kind], use_cache=False)
    added = causal.train()(tokens, labels=tokens, use_cache=False).aux_loss
    assert added > 0 and torch.equal(trained.aux_loss, added)
    assert torch.equal(trained.loss, plain.loss + added)
    trained.loss.backward()
    routers = [parameter.grad for name, parameter in head.named_parameters() if "router" in name]
    assert routers and all(gradient is not None and gradient.abs().sum() > 0 for gradient in routers)
    assert torch.equal(head(tokens, **LABELS[kind], output_router_logits=False, use_cache=False).loss, plain.loss)
    with torch.no_grad():
        wanted = head.eval()(tokens, **LABELS[kind], output_router_logits=True)
    assert wanted.router_logits and torch.equal(wanted.loss, plain.loss + wanted.aux_loss)
    assert isinstance(head(tokens, return_dict=False, output_router_logits=True), tuple)


def test_a_loss_outside_the_head_is_warned_of_and_gets_the_losses_of_routers_on_request():
    head = head_of("ForSequenceClassification", chapter_model(routing="chunk")).train()
    with pytest.warns(UserWarning, match="no labels, so the losses of its routers are not added; .* add aux_loss"):
        head(prompt(), use_cache=False)
    head(prompt(), use_cache=False, output_router_logits=True).aux_loss.backward()
    assert all(parameter.grad is not None for name, parameter in head.named_parameters() if "router" in name)


@pytest.mark.filterwarnings("error")
def test_the_whole_text_is_the_prompt_of_a_head():
    head, tokens = head_of("ForSequenceClassification", chapter_model(routing="prompt")), prompt()
    everything = torch.ones_like(tokens, dtype=torch.bool)
    with torch.no_grad():
        assert torch.equal(head(tokens).logits, head(tokens, prompt_mask=everything).logits)
        assert not torch.equal(head(tokens).logits, head(tokens, prompt_mask=everything.cumsum(1) < 5).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_trainer_passes_ids_of_memories_on_and_trains(kind, tmp_path):
    causal = CASES["hier-ffn"].model("llama", tmp_path / "bank", torch.float32)
    head = head_of(kind, causal)
    head.banks._open = causal.banks._open
    inputs = {"input_ids": prompt(), **CASES["hier-ffn"].given(), **LABELS[kind]}
    rows = [{name: values[row] for name, values in inputs.items()} for row in range(2)]
    seen = []
    head.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs["memory_ids"]), with_kwargs=True)
    arguments = TrainingArguments(tmp_path, max_steps=2, use_cpu=True, report_to="none", save_strategy="no")
    trainer = Trainer(head, arguments, train_dataset=rows, eval_dataset=rows)
    before = layer_of(head).weight.clone()
    trainer.train()
    assert "eval_loss" in trainer.evaluate() and len(seen) == 3
    assert not torch.equal(layer_of(head).weight, before)
