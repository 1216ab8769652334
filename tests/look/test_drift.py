"""How far predictions moved: exactly nowhere right after upscaling, and otherwise as the definition has it."""

import pytest
import torch
from look.upscaled_folders import METHODS, acting, loaded, saved_pair
from tiny import prompt, tiny_model
from torch.nn import functional as F
from training.tiny_run import refused

from midus_hf.evaluation.text_rows import TextRows, read_rows
from midus_hf.look.drift import base_within, drift, drift_rows, drift_table, other_base
from midus_hf.look.effects import Effect
from upscalers.runs.base_confirmation import keeps_base

TEXT = TextRows("text", [prompt(20, 1)[0], prompt(14, 1, seed=2)[0], prompt(9, 1, seed=3)[0]], [0, 1, 2])


@pytest.mark.parametrize("method", METHODS)
def test_right_after_upscaling_nothing_has_moved_at_all(family, method):
    base, folder = saved_pair(family, method)
    model = loaded(folder)
    for logits_of_base in (base_within(model), other_base(model, loaded(base))):
        (result,) = drift(model, logits_of_base, [TEXT], batch_size=2)
        assert [result.divergence, result.changed, result.loss_effect] == [Effect(0.0, 0.0)] * 3
        assert result.loss == result.base_loss
    assert keeps_base(folder)


def test_divergence_is_that_of_the_definition(family):
    base, folder = saved_pair(family, "midus-hml")
    model, of_base = acting(loaded(folder)), loaded(base)
    (result,) = drift(model, base_within(model), [TEXT], batch_size=2)
    sums, changed = [], 0
    for row in TEXT.rows:
        with torch.no_grad():
            logs, base_logs = (each(row[None]).logits[0, :-1].double().log_softmax(-1) for each in (model, of_base))
        divergence = F.kl_div(logs, base_logs, reduction="none", log_target=True).sum(-1)
        sums.append(divergence.sum())
        changed += int((logs.argmax(-1) != base_logs.argmax(-1)).sum())
    assert result.tokens == 40 and result.divergence.difference == pytest.approx(float(sum(sums)) / 40, rel=1e-4)
    assert result.changed.difference == changed / 40 and result.divergence.standard_error > 0
    losses = read_rows(model, TEXT, batch_size=2), read_rows(of_base, TEXT, batch_size=2)
    assert result.loss == pytest.approx(losses[0].mean, rel=1e-5)
    assert result.base_loss == pytest.approx(losses[1].mean, rel=1e-5)
    assert result.loss_effect.difference == pytest.approx(result.loss - result.base_loss, abs=1e-9)
    (line,), (row,) = drift_table([result]).rows, drift_rows([result])
    assert line[:3] == ["text", "40", f"{result.divergence:.5f}"] and " ± " in line[2]
    assert row["divergence"] == result.divergence.difference and row["loss_effect_error"] > 0


def test_long_rows_are_compared_in_parts(monkeypatch):
    model = acting(loaded(saved_pair("llama", "midus-hml")[1]))
    (whole,) = drift(model, base_within(model), [TEXT])
    monkeypatch.setattr("midus_hf.look.drift._POSITIONS", 7)
    (parts,) = drift(model, base_within(model), [TEXT])
    assert parts.divergence.difference == pytest.approx(whole.divergence.difference) and parts.changed == whole.changed


def test_broken_weights_are_an_error():
    model, broken = tiny_model("llama"), tiny_model("llama")
    broken.lm_head.weight.data[5] = torch.nan
    with pytest.raises(RuntimeError, match="a prediction of text 'text' is not finite"):
        drift(broken, other_base(broken, model), [TEXT])


def test_models_and_requests_that_do_not_fit_are_refused():
    model = loaded(saved_pair("llama", "midus-hml")[1])
    with refused("the model predicts 128 tokens and the base 96; expected one vocabulary"):
        other_base(model, tiny_model("llama", vocab_size=96))
    with refused("batch_size is 0; expected at least 1"):
        drift(model, other_base(model, model), [TEXT], batch_size=0)
    model.config.upscale["plan"].pop(0)
    with refused("base is 'self', but the model does not have all layers of its base; expected"):
        base_within(model)
