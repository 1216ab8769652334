"""With a document mask, packed documents are computed as if each stood alone."""

import torch
from tiny import WINDOW, prompt
from transformers import AutoModelForCausalLM

from midus_hf.training.run import TrainingRun

LENGTHS = (5, 2 * WINDOW, 3)


def test_masked_logits_are_those_of_each_document_alone(family, upscaled):
    model = AutoModelForCausalLM.from_pretrained(upscaled(family)).eval()
    model.config.use_cache = False
    with torch.no_grad():
        for layer in (1, 4):
            model.model.layers[layer].memory.value_bank.normal_(generator=torch.Generator().manual_seed(layer))
    tokens = prompt(length=sum(LENGTHS), batch=1)[0]  # [T]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    with torch.no_grad():
        packed = model(input_ids=tokens[None], position_ids=positions[None]).logits
        alone = torch.cat([model(input_ids=part[None]).logits for part in tokens.split(LENGTHS)], dim=1)
        joined = model(input_ids=tokens[None]).logits
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(joined, alone, rtol=1e-4, atol=1e-5)


def test_a_run_gives_the_model_positions_and_no_cache(config_for):
    run = TrainingRun(config_for(document_mask=True, sequence_length=122))
    batch = next(iter(run.trainer.get_train_dataloader()))
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert run.model.config.use_cache is False
    restarts = batch["position_ids"][:, 1:] == 0
    assert restarts.any()
    assert torch.equal(batch["labels"][:, 1:] == -100, restarts)
