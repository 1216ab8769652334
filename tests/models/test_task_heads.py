"""Task heads over stacks that host memory, with and without the package."""

import re

import pytest
import torch
import transformers
from models.cases import CASES, chosen_in_turn
from models.fresh_process import run_python
from models.hosting import host_config
from models.memory_models import chapter_model
from tiny import NATIVE_FAMILIES, prompt, tiny_model
from transformers import set_seed
from transformers.models.auto import modeling_auto

KINDS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
LABELS = {
    "ForSequenceClassification": {"labels": torch.tensor([2, 0])},
    "ForTokenClassification": {"labels": prompt() % 3},
    "ForQuestionAnswering": {"start_positions": torch.tensor([1, 4]), "end_positions": torch.tensor([3, 4])},
}
# Loads a head, and computes its logits as one tensor.
_LOAD = """
import torch, transformers

def loaded(kind, folder, **settings):
    head, info = getattr(transformers, f"AutoModel{kind}").from_pretrained(folder, output_loading_info=True, **settings)
    return head.eval(), info

def logits_of(head, tokens, **arguments):
    with torch.no_grad():
        output = head(tokens, **arguments)
    return output.logits if "logits" in output else torch.stack((output.start_logits, output.end_logits), -1)
"""
here = {}
exec(_LOAD, here)
loaded, logits_of = here["loaded"], here["logits_of"]


def kinds_of(family):
    config = NATIVE_FAMILIES[family].config_class
    return [kind for kind in KINDS if config in getattr(transformers, f"AutoModel{kind}")._model_mapping]


def head_of(kind, model, **settings):
    set_seed(5)
    config = type(model.config).from_dict({**model.config.to_dict(), "num_labels": 3, "pad_token_id": 0, **settings})
    head = getattr(transformers, f"AutoModel{kind}").from_config(config).to(model.dtype).eval()
    head.model.load_state_dict(model.model.state_dict())
    return head


@pytest.mark.parametrize(("case", "kind"), chosen_in_turn(KINDS))
def test_task_head_reads_the_stack_with_memory_inputs(case, kind, shared_model):
    causal, given, mask = shared_model(case), CASES[case].given(), torch.ones_like(prompt())
    head = head_of(kind, causal)
    for key, service in causal.model.services.items():
        for name in {"banks", "glossary"} & {*dir(service)}:
            setattr(head.model.services[key], name, getattr(service, name))
    mask[0, :5] = 0
    with torch.no_grad():
        hidden = causal.model(prompt(), attention_mask=mask, **given).last_hidden_state
        expected = (head.qa_outputs if kind == "ForQuestionAnswering" else head.score)(hidden)
    if kind == "ForSequenceClassification":
        expected = expected[:, -1]
    assert torch.equal(logits_of(head, prompt(), attention_mask=mask, **given), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_task_head_without_memories_is_the_base_s(native_family, kind):
    if kind not in kinds_of(native_family):
        pytest.skip("Transformers has no such head of the family")
    config, auto = tiny_model(native_family).config, getattr(transformers, f"AutoModel{kind}")
    set_seed(3)
    base, head = (auto.from_config(each).eval() for each in (config, host_config(config, [])))
    head.load_state_dict({name.replace("transformer.", "model.", 1): each for name, each in base.state_dict().items()})
    assert torch.equal(logits_of(head, prompt()), logits_of(base, prompt()))
    table = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.removeprefix("For")).upper()
    assert type(head).__name__ in getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").values()
    assert modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(head.config.model_type) != type(head).__name__


@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_routers_join_the_loss_in_training(kind):
    causal = chapter_model(routing="chunk")
    head, tokens = head_of(kind, causal, classifier_dropout=0.0), prompt()
    plain = head(tokens, **LABELS[kind])
    assert "aux_loss" not in plain
    trained = head.train()(tokens, **LABELS[kind], use_cache=False)
    added = causal.train()(tokens, labels=tokens, use_cache=False).aux_loss
    assert added > 0
    assert torch.equal(trained.aux_loss, added)
    assert torch.equal(trained.loss, plain.loss + added)
    trained.loss.backward()
    routers = [parameter.grad for name, parameter in head.named_parameters() if "router" in name]
    assert routers
    assert all(gradient is not None and gradient.any() for gradient in routers)
    with torch.no_grad():
        wanted = head.eval()(tokens, **LABELS[kind], output_router_logits=True)
    assert wanted.router_logits
    assert torch.equal(wanted.loss, plain.loss + wanted.aux_loss)


def test_task_heads_of_a_language_model_load_without_the_package(tmp_path):
    chapter_model(routing="chunk", dtype=torch.float32).save_pretrained(tmp_path / "causal")
    expected = {}
    for kind in KINDS:
        head, info = loaded(kind, tmp_path / "causal", num_labels=2)
        assert info["missing_keys"] == {name for name in head.state_dict() if not name.startswith("model.")}
        head.save_pretrained(tmp_path / kind)
        expected[kind] = logits_of(head, prompt()), sorted(info["missing_keys"])
    torch.save(prompt(), tmp_path / "prompt.pt")
    run_python(
        f"""{_LOAD}
found = {{}}
for kind in {KINDS}:
    lacking = loaded(kind, "causal", trust_remote_code=True, num_labels=2)[1]["missing_keys"]
    head, info = loaded(kind, kind, trust_remote_code=True)
    assert not info["missing_keys"] and type(head).__module__.endswith("modeling_midus")
    found[kind] = logits_of(head, torch.load("prompt.pt")), sorted(lacking)
torch.save(found, "found.pt")
""",
        tmp_path,
        package_present=False,
    )
    for kind, (logits, lacking) in torch.load(tmp_path / "found.pt").items():
        torch.testing.assert_close(logits, expected[kind][0], rtol=1e-5, atol=1e-5)
        assert lacking == expected[kind][1]
