"""What a method made computes, generates, trains and is saved where this project is not installed: by the family's own class, or by
the code that the folder carries."""

import json
from pathlib import Path

import pytest
import torch
from models.fresh_process import run_python
from pairs import by_default, taking_turns
from tiny import NATIVE_FAMILIES, WINDOW, prompt
from transformers import AutoModelForCausalLM, AutoTokenizer

from material.smollm2 import smollm2_135m
from tests.upscalers.checkpoints import config_of, load, save_base
from tests.upscalers.dense.requests import REQUESTS
from tests.upscalers.methods import DIFFERING, KINDS, trained
from upscalers.runs.upscale import upscale

# Kinds whose options need other code than those of their method do; tests/carried has the methods themselves.
OTHER_CODE = (
    "midus-hml, output projection", "moc, own", "moc, per token", "moc, per sequence", "ultramem-v2, ring",
    "ultramem-v2, memory plus", "moda, released", "moda, last",
)  # fmt: skip
CASES = {
    kind: (family, number)
    for number, (kind, family) in enumerate(taking_turns([*REQUESTS, *OTHER_CODE], NATIVE_FAMILIES))
}

RUN = """
import json, os, sys
from pathlib import Path
import transformers
from transformers import AutoModel, AutoModelForCausalLM

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

def loaded(folder):
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=True, output_loading_info=True)
    return model.eval(), [sorted(map(str, info[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")]

def code(folder):
    return [path.read_text() for path in Path(folder).glob("*.py")]

def refuses_without_code(folder):
    os.remove(f"{folder}/modeling_midus.py")
    try:
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    except OSError:
        return True

@torch.no_grad()
def computed(model, tokens):
    return model(tokens).logits

for case, tokens in json.load(open("cases.json")):
    tokens = torch.tensor(tokens)
    (base, _), (model, wrong) = loaded(f"{case}/base"), loaded(f"{case}/out")
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    text = model.generate(tokens, use_cache=True, **settings)
    row = {
        "class": [type(model).__module__.partition(".")[0], type(model).__name__],
        "dtype": str(model.dtype).removeprefix("torch."),
        "layers": len(model.model.layers),
        "wrong": wrong,
        "of the base": torch.equal(computed(model, tokens), computed(base, tokens)),
        "text of the base": torch.equal(text, base.generate(tokens, use_cache=True, **settings)),
        "text without cache": torch.equal(text, model.generate(tokens, use_cache=False, **settings)),
    }
    acting, _ = loaded(f"{case}/acting")
    row["acts"] = torch.allclose(computed(acting, tokens), torch.load(f"{case}/acting.pt"), rtol=1e-4, atol=1e-5)
    acting.save_pretrained(f"{case}/again")
    row["saved"] = torch.equal(computed(loaded(f"{case}/again")[0], tokens), computed(acting, tokens))
    row["saved code"] = code(f"{case}/again") == code(f"{case}/acting")
    stack = AutoModel.from_pretrained(f"{case}/again", dtype="auto", trust_remote_code=True).eval()
    with torch.no_grad():
        row["stack"] = torch.equal(stack(tokens).last_hidden_state, acting.model(tokens).last_hidden_state)
    row["needs code"] = bool(code(f"{case}/again")) and refuses_without_code(f"{case}/again")
    loss = acting.train()(tokens, labels=tokens).loss
    loss.backward()
    row["loss"] = torch.allclose(loss, torch.load(f"{case}/loss.pt"), rtol=1e-4, atol=1e-5)
    row["trains"] = [name for name, parameter in acting.named_parameters() if parameter.grad is None]
    print(json.dumps([case, row]))
assert not {"midus_hf", "upscalers"} & {name.partition(".")[0] for name in sys.modules}
"""


def make(folder: Path, kind: str, tokens: torch.Tensor, **changes) -> None:
    """Upscale the base in a folder, and store what the result computes once its new parameters act."""
    upscale(base=folder / "base", output=folder / "out", verify=False, **{**KINDS[kind], **changes})
    model = load(trained(folder / "out", folder / "acting"))
    with torch.no_grad():
        torch.save(model(tokens).logits, folder / "acting.pt")
    torch.save(model.train()(tokens, labels=tokens).loss.detach(), folder / "loss.pt")


def run(folder: Path, cases: dict[str, torch.Tensor]) -> dict[str, dict]:
    """Return what the program found of each case, by the tokens that it is given."""
    (folder / "cases.json").write_text(json.dumps([(case, tokens.tolist()) for case, tokens in cases.items()]))
    return dict(map(json.loads, run_python(RUN, folder, package_present=False).splitlines()))


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> tuple[Path, dict[str, dict]]:
    """Make kinds here, and return what a process found of them in which this project cannot be imported."""
    folder = tmp_path_factory.mktemp("elsewhere")
    assert prompt().shape[1] > WINDOW
    for kind, (family, number) in CASES.items():
        dtype = torch.bfloat16 if number % 4 == 1 else torch.float32
        save_base(folder / kind / "base", family, dtype)
        make(folder / kind, kind, prompt())
    return folder, run(folder, dict.fromkeys(CASES, prompt()))


@pytest.mark.parametrize("kind", CASES)
def test_a_folder_works_without_the_package_as_it_does_with_it(kind, results):
    folder, rows = results
    row, config = rows[kind], config_of(folder / kind / "out")
    (class_name,) = config["architectures"]
    carried = config["model_type"].startswith("midus_")
    assert carried == (kind not in REQUESTS) == (folder / kind / "out" / "modeling_midus.py").is_file()
    single, identical = row.pop("dtype") == "float32", kind not in DIFFERING
    # Other sums round otherwise where a cache is read in bfloat16, so that another token may be the best.
    assert row.pop("text without cache") or not single
    assert (row.pop("of the base"), row.pop("text of the base") or not identical) == (identical, True)
    assert all([row.pop("acts"), row.pop("loss")]) or not single
    assert row == {
        "class": ["transformers_modules" if carried else "transformers", class_name],
        "layers": config["num_hidden_layers"],
        "wrong": [[], [], []],
        "saved": True,
        "saved code": True,
        "stack": True,
        "needs code": carried,
        "trains": [],
    }
    again, before = (AutoModelForCausalLM.from_pretrained(folder / kind / name) for name in ("again", "acting"))
    assert type(again) is type(before)
    state, expected = again.state_dict(), before.state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)


# Methods that would compute for long on a real model: fewer layers, less training.
QUICK = {
    "lesa": {"num_new_layers": 2, "options": {"epochs": 1, "hidden_size": 32, "batch_size": 512}},
    "opt-deus": {"num_new_layers": 2, "options": {"tolerance": 1e-2}},
}
# One that promises identity and one that fuses.
BY_DEFAULT = ("llama-pro", "avg-deus")


@pytest.mark.material
@pytest.mark.parametrize(
    ("methods",),
    by_default([(BY_DEFAULT,)], [(BY_DEFAULT,), (tuple(method for method in REQUESTS if method not in BY_DEFAULT),)]),
    ids=len,
)
def test_dense_methods_make_native_models_of_a_real_checkpoint(methods, tmp_path):
    """Of its first layers."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_135m())
    tokens = tokenizer("The seven wonders of the ancient world", return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(smollm2_135m(), num_hidden_layers=4)
    for method in methods:
        model.save_pretrained(tmp_path / method / "base")
        make(tmp_path / method, method, tokens, **QUICK.get(method, {}))
    for method, row in run(tmp_path, dict.fromkeys(methods, tokens)).items():
        assert row["class"] == ["transformers", "LlamaForCausalLM"] and row["wrong"] == [[], [], []], method
        assert row["text without cache"] and row["acts"] and row["saved"] and row["trains"] == [], method
        assert row["of the base"] == row["text of the base"] == (method not in DIFFERING), method
