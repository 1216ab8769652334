"""`transformers serve` and `transformers chat`, pipelines and continuous batching run the code that a checkpoint carries."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from models.fresh_process import BLOCK_IMPORTS, run_python
from serving.answering import MOST_SECONDS, answering, choice_of
from tiny import save_tiny_tokenizer

ROOT = Path(__file__).parents[2]
QUESTION = "word5 word9 word20"

_EXPECTED = """
import json
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig, pipeline
from transformers.cli.serving.model_manager import ModelManager
found, manager = {}, ModelManager(device="cpu", trust_remote_code=True)  # what `transformers serve` loads models with
for name in ("midus-hml", "chapters"):
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
    text = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], tokenize=False)
    ids = tokenizer(text, return_tensors="pt").input_ids
    greedy = {"max_new_tokens": 8, "do_sample": False}
    tokens = model.generate(ids, **greedy)[0, ids.shape[1]:]
    generator = pipeline("text-generation", model=name, trust_remote_code=True, device="cpu")
    (of_pipeline,) = generator(text, return_full_text=False, **greedy)
    served, processor = manager.load_model_and_processor(manager.process_model_name(name))
    try:
        results = model.generate_batch(
            ids.tolist(),
            generation_config=GenerationConfig(**greedy, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64),
        )
        batched = [result.generated_tokens for result in results.values()]
    except ValueError as error:
        batched = str(error)
    found[name] = {
        "module": type(model).__module__, "text": tokenizer.decode(tokens), "tokens": tokens.tolist(),
        "pipeline": of_pipeline["generated_text"], "batched": batched,
        "served": [type(served).__module__, processor.decode(served.generate(ids, **greedy)[0, ids.shape[1]:])],
    }
manager.shutdown()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(checkpoints, tmp_path_factory) -> Path:
    """A folder with two checkpoints of one family, each with a tokenizer that has a chat template."""
    folder = tmp_path_factory.mktemp("served")
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    for name, method in {"midus-hml": "midus-hml", "chapters": "moc"}.items():
        shutil.copytree(checkpoints("llama", method), folder / name)
        save_tiny_tokenizer(folder / name, chat_template=template)
    return folder


@pytest.fixture(scope="module")
def isolated(folder) -> dict[str, Any]:
    """What `generate`, a pipeline and continuous batching give for each checkpoint in a process without this project."""
    printed = run_python(f"QUESTION = {QUESTION!r}\n{_EXPECTED}", folder, package_present=False)
    return json.loads(printed.splitlines()[-1])


def command(package_present: bool, *arguments: str) -> list[str]:
    start = "import runpy; runpy.run_module('transformers.cli.transformers', run_name='__main__')"
    return [sys.executable, "-c", f"{'' if package_present else BLOCK_IMPORTS}\n{start}", *arguments]


def environment(folder: Path, offline: str = "1") -> dict[str, str]:
    settings = {"HF_HUB_OFFLINE": offline, "HF_HUB_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **settings, "HF_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}


@pytest.mark.product
@pytest.mark.parametrize(("package_present", "models"), [(False, ()), (True, ("midus-hml",))])
def test_server_answers_as_generate_does(package_present, models, folder, isolated):
    """The package may be installed: the server imports nothing of it. A chat on the command line has the same answer."""
    serve = command(package_present, "serve", *models, "--trust-remote-code", "--device", "cpu")
    with answering(serve, folder / f"log-{package_present}", cwd=folder, env=environment(folder)) as address:
        for name in models or ("midus-hml", "chapters"):  # classes of the same names, of two modules
            messages = [{"role": "user", "content": QUESTION}]
            chat = choice_of(address, "chat/completions", model=name, max_tokens=8, messages=messages)
            assert chat["message"]["content"] == isolated[name]["text"]
            prompt = f"{QUESTION} "  # what the template makes of the question
            completion = choice_of(address, "completions", model=name, max_tokens=8, prompt=prompt)
            assert completion["text"] == isolated[name]["text"]
        words = ("chat", "midus-hml", f"{address}/v1", "max_new_tokens=8", "do_sample=false")
        # Offline, its client refuses to ask any server.
        talk = subprocess.run(
            command(package_present, *words),
            **{"cwd": folder, "env": environment(folder, offline="0"), "input": f"{QUESTION}\n!exit\n", "text": True},
            **{"capture_output": True, "timeout": MOST_SECONDS},
        )
    assert isolated["midus-hml"]["text"] in " ".join(talk.stdout.split()), talk.stderr + talk.stdout


def test_serving_tools_run_the_code_of_a_checkpoint(isolated):
    for result in isolated.values():
        assert result["module"].endswith(".modeling_midus")
        assert result["pipeline"] == result["text"]
        assert result["served"] == [result["module"], result["text"]]
    assert isolated["midus-hml"]["batched"] == [isolated["midus-hml"]["tokens"]]
    assert "keeps nothing for the memory 'chapters'" in isolated["chapters"]["batched"]
