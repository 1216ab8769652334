"""Two processes that share a batch train as one process that has all of it."""

import itertools
import json

import pytest
from training.outcomes import as_it_was_at, assert_same_run, largest_difference, logged
from training.tiny_run import save_upscaled, tiny_tokenizer
from training.two_processes import METHODS, SCRIPT, in_two_processes, write_recipe

from midus_hf.cli.training.train import main
from midus_hf.training.data.former_corpus import find_corpus
from midus_hf.training.data.former_packing import PackedStream, tokenise
from midus_hf.training.options import CorpusOptions

OPTIONS = {
    "llama-pro": {},
    "midus-hml": {"balance_loss": 0.5, "usage_steps": 1, "document_mask": "true"},
    "ultramem-v2": {},
}
ALSO_LOGGED = {"midus-hml": ["balance_loss", "memory_used_share", "memory_perplexity"]}


@pytest.mark.product
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_train_as_one(method, corpus, tmp_path):
    recipe = write_recipe(tmp_path, save_upscaled("llama", tmp_path, method), corpus, **OPTIONS[method])
    assert main([str(recipe), "per_device_train_batch_size=4", f"output_dir={tmp_path / 'one'}"]) == 0
    in_two_processes(recipe, f"output_dir={tmp_path / 'two'}")
    for name in ("loss", "grad_norm", *ALSO_LOGGED.get(method, [])):
        one, two = (logged(tmp_path / folder, name) for folder in ("one", "two"))
        assert two == pytest.approx(one, rel=1e-4) and len(one) == 6, name
    assert largest_difference(tmp_path / "one", tmp_path / "model") > 1e-2
    assert largest_difference(tmp_path / "two", tmp_path / "one") < 1e-4


STREAMS = {"a-folder": {}, "documents-that-are-masked": {"document_mask": "true"}}


@pytest.mark.product
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_read_by_the_first_process_in_the_order_of_one_and_gone_on_with(name, corpus, tmp_path):
    """Each sequence is trained on by one process, once."""
    model = save_upscaled("llama", tmp_path, "llama-pro")
    recipe = write_recipe(tmp_path, model, f"{{path: {corpus}, streaming: true}}", save_steps=3, **STREAMS[name])
    spy = tmp_path / "spy.py"
    spy.write_text(NOTES_WHAT_IS_TRAINED_ON)
    in_two_processes(recipe, f"output_dir={tmp_path / 'two'}", script=spy, SEEN=str(tmp_path), PROGRAM=str(SCRIPT))
    assert main([str(recipe), "per_device_train_batch_size=4", f"output_dir={tmp_path / 'one'}"]) == 0
    assert logged(tmp_path / "two", "loss") == pytest.approx(logged(tmp_path / "one", "loss"), rel=1e-5)
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    texts = find_corpus(CorpusOptions(path=str(corpus)))
    packed = PackedStream(lambda: tokenise(texts.documents(), tiny_tokenizer()), 16)
    expected = [example["input_ids"].tolist() for example in itertools.islice(packed, 24)]
    taken = [sequence for step in zip(*seen, strict=True) for batch in step for sequence in batch]
    assert taken == expected

    resumed = as_it_was_at(3, tmp_path / "two", tmp_path / "resumed")
    in_two_processes(recipe, f"output_dir={resumed}", "resume_from_checkpoint=true")
    assert_same_run(resumed, tmp_path / "two")


NOTES_WHAT_IS_TRAINED_ON = """
import json, os, pathlib, runpy, sys
from midus_hf.training.trainer.memory_trainer import TrainsMemory

seen, step = [], TrainsMemory.training_step

def training_step(self, model, inputs, *args, **kwargs):
    seen.append(inputs["input_ids"].tolist())
    return step(self, model, inputs, *args, **kwargs)

TrainsMemory.training_step = training_step
sys.argv[0] = os.environ["PROGRAM"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    pathlib.Path(os.environ["SEEN"], os.environ["RANK"] + ".json").write_text(json.dumps(seen))
"""
