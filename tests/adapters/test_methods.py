"""Every method of PEFT either trains the model and is merged into its weights, or is refused."""

import pytest
import torch
from adapters.adapted_models import logits
from models.optimizer_steps import train_steps
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from tiny import prompt, tiny_model
from training.tiny_run import refused

from midus_hf.training.adapters import add_adapters, merge_adapters

# BOFT compiles a kernel of its own where there is a compiler, which takes longer than all else here.
METHODS = sorted({kind.value.lower() for kind in PEFT_TYPE_TO_CONFIG_MAPPING} - {"boft"})

REFUSED = {
    **dict.fromkeys(("prompt_tuning", "multitask_prompt_tuning", "p_tuning", "prefix_tuning", "cpt"), "cannot be"),
    **dict.fromkeys(("cartridge", "adaption_prompt", "xlora"), "cannot be"),
    **dict.fromkeys(("beft", "lily", "poly", "shadow"), "cannot be merged"),
    "adalora": "a call after every step",
}

# What suits matrices of 16 to 48 rows and columns where the default is for larger ones.
KEYS = {
    "c3a": {"block_size": 16},
    "fourierft": {"n_frequency": 20},
    "miss": {"r": 4},
    "poly": {"r": 4},
    "psoft": {"r": 4},
    "road": {"group_size": 16},
    "shira": {"r": 4},
    "trainable_tokens": {"token_indices": prompt().unique().tolist()},
    "vblora": {"vector_length": 16},
    "waveft": {"n_frequency": 20},
}


@pytest.mark.parametrize("method", METHODS)
def test_it_trains_and_is_merged_or_is_refused(method):
    model = tiny_model("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    untrained, options = logits(model), {"method": method, **KEYS.get(method, {})}
    if method in REFUSED:
        with refused(rf"adapters\.method is '{method}', .*{REFUSED[method]}"):
            add_adapters(model, options)
        return
    adapted, _ = add_adapters(model, options)
    train_steps(adapted.train(), 3)
    trained = logits(adapted)
    assert not torch.allclose(trained, untrained, atol=1e-4)
    merged = merge_adapters(adapted)
    torch.testing.assert_close(logits(merged), trained, rtol=1e-4, atol=1e-5)
    assert merged.state_dict().keys() == before.keys()
