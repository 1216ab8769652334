"""A day of someone whose models, texts and adapters are on the Hub.

Without --product it is short: packs on a private base, pushed, loaded without the package, and a connection that breaks.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from hub.day import BASE
from hub.repositories import Fault

product = pytest.mark.product
SMALL_TREE = ("--set", "sizes=[4,2]", "--set", "branching=2")
OPTIONS = {
    "stack": ("--set", "layers=0-2,1-3"),
    "ultramem-v2": ("--set", "n=16"),
    "midus-hml": ("--set", "n=8"),
    "midus-pkm": ("--set", "n=8"),
    "midus-linear": ("--set", "slots=64"),
    "engram": ("--set", "rows=101"),
    "hier-ffn": ("--set", "sizes=[8,4]", "--set", "branching=2"),
    "hier-lora-qk": SMALL_TREE,
    "hier-kv": SMALL_TREE,
}
PUSHED = {"hml": "midus-hml", "hier": "hier-ffn"}
METHODS = (*OPTIONS, "llama-pro", "solar", "avg-deus", "opt-deus", "lesa", "moc", "moda")
PACKS = ("--method", "packs", "--corpus", "glossary.jsonl")
EXACT = ("--method", "engram", "--set", "table=exact", "--corpus", "org/texts")
TWO_STEPS = ("--max_steps", 2, "--sequence_length", 32, "--report_to", "none", "--bf16", "false")
ALL = ("--trainable", "all", *TWO_STEPS)


class Case(NamedTuple):
    """Words of a command, without its output; how it ends, and what it says then."""

    words: tuple[Any, ...]
    token: bool = False
    status: int = 0
    says: tuple[str, ...] = ()


def upscaling(base: str, *words: Any) -> tuple[Any, ...]:
    return ("upscale", "--base", base, *(words or ("--method", "llama-pro")))


def training(*words: Any) -> tuple[Any, ...]:
    return ("midus", "train", *words)


UPSCALED = {
    **{method: Case(upscaling(BASE, "--method", method, *OPTIONS.get(method, ()))) for method in METHODS},
    "packs": Case(upscaling(BASE, *PACKS)),
    "packs, dry": Case(upscaling(BASE, *PACKS, "--dry-run")),
    "a glossary of the Hub": Case(upscaling(BASE, "--method", "packs", "--corpus", "org/glossary")),
    "engram exact": Case(upscaling(BASE, *EXACT)),
    "engram exact, dry": Case(upscaling(BASE, *EXACT, "--dry-run")),
    "gated": Case(upscaling("org/gated"), token=True),
    "gated, no token": Case(upscaling("org/gated"), status=2, says=("org/gated", "accept its terms", "hf auth login")),
    "gated, no access": Case(upscaling("org/refused"), token=True, status=2, says=("org/refused", "403")),
    "private, no token": Case(upscaling("org/secret"), status=2, says=("org/secret",)),
    "no such base": Case(upscaling("org/none"), status=2, says=("org/none",)),
}
TRAINED = {
    "data set": Case(training("org/texts", "--model", BASE, *ALL)),
    "split": Case(training("org/texts", "--model", BASE, "--corpus_split", "test", *ALL)),
    "shards": Case(training("org/shards", "--model", BASE, *ALL)),
    "streamed shards": Case(training("org/shards", "--model", BASE, "--streaming", "true", *ALL)),
    "private": Case(training("org/secret", "--model", BASE, *ALL), token=True),
    "private, no token": Case(training("org/secret", "--model", BASE, *ALL), status=2, says=("org/secret",)),
    "no such data": Case(training("org/none", "--model", BASE, *ALL), status=2, says=("org/none",)),
    "pushed model": Case(training("texts.jsonl", "--model", "me/hml", *TWO_STEPS)),
    "config of a pushed bank": Case(
        training(
            *("paths.jsonl", "--path_column", "memory_ids"),
            *("--config_name", "me/hier", "--tokenizer_name", BASE, *TWO_STEPS),
        )
    ),
    "sft": Case((
        "midus", "sft", "org/chats", "--model", BASE, "--trainable", "all", "--chat_template_path", "chatml",
        "--max_length", 96, "--max_steps", 2, "--report_to", "none", "--bf16", "false",
    )),
}  # fmt: skip
READ = {
    "upscaled again": Case(upscaling("me/packs"), says=("largest difference 0",)),
    "upscaled again, bank": Case(upscaling("me/hier"), says=("largest difference 0",)),
    "inspect": Case(("upscale", "inspect", "me/packs"), says=("packs",)),
    "strip": Case(("upscale", "strip", "me/hml", "--output")),
    "ask": Case(("midus", "ask", "me/packs", "What does the Kestrel gateway do?", "--max-new-tokens", 2)),
    "eval": Case(
        ("midus", "eval", BASE, "me/hml", "--text", "glossary.jsonl", "--max-tokens", 64, "--sequence-length", 32)
    ),
    "flops": Case(("midus", "flops", "me/hml")),
    "glossary": Case(("midus", "look", "glossary", "me/packs"), says=("Kestrel gateway",)),
    "touched": Case(("midus", "look", "touched", "me/packs", "--text", "glossary.jsonl"), says=("packs",)),
    "list": Case(("midus", "edit", "list", "me/packs"), says=("Merlin cache",)),
    "delete": Case(("midus", "edit", "delete", "me/packs", "--name", "Merlin cache", "--output")),
    "delete there": Case(
        ("midus", "edit", "delete", "me/packs", "--name", "Merlin cache"), status=2, says=("--output",)
    ),
}


@pytest.fixture
def ends(day, tmp_path):
    """Run a case with an output folder; check its end, and that a refusal is one line and leaves nothing."""

    def run(case: Case) -> Path:
        out, words = tmp_path / "out", case.words
        if words[-1] == "--output":
            words = (*words, out)
        elif words[:2] in (("midus", "train"), ("midus", "sft")) or words[1] == "--base":
            words = (*words, "--output", out)
        done = day.run(*words, token=case.token)
        assert done.status == case.status, done.err
        assert "Traceback" not in done.err, done.err
        assert all(said in done.out + done.err for said in case.says), done
        if case.status:
            assert not out.exists()
            assert 'File "' not in done.err
        return out

    return run


@pytest.fixture(scope="module")
def pushed(day):
    """Models that `upscale` pushed: `me/packs`, of a private base, and those of `PUSHED`; their folders here by names."""
    requests = {
        "me/packs": ("org/secret", *PACKS),
        **{f"me/{name}": (BASE, "--method", method, *OPTIONS[method]) for name, method in PUSHED.items()},
    }
    folders = {}

    def push(name: str) -> Path:
        if name not in folders:
            folders[name] = day.folder / name.replace("/", "-")
            words = (*upscaling(*requests[name]), "--output", folders[name], "--push-to-hub", name)
            done = day.run(*words, token=True)
            assert done.status == 0, done.err
        return folders[name]

    return push


def test_packs_of_a_private_base_are_pushed_and_load(day, pushed):
    folder = pushed("me/packs")
    assert day.hub.repositories["me/packs"].files.keys() == {path.name for path in folder.iterdir()}
    from_the_hub, from_the_folder = day.logits("me/packs", folder, has_package=False)
    assert from_the_hub == from_the_folder


CUT = [
    (upscaling(BASE), BASE, "/large/"),
    pytest.param(("midus", "ask", BASE, "What?"), BASE, "/large/", marks=product),
    pytest.param(training("texts.jsonl", "--model", BASE, *ALL), BASE, "/large/", marks=product),
    pytest.param(training("org/texts", "--model", BASE, *ALL), "org/texts", "/train.jsonl", marks=product),
]


@pytest.mark.parametrize(("words", "fetched", "part"), CUT)
def test_cut_connection_is_a_sentence(words, fetched, part, day, faults, tmp_path):
    faults.append(Fault(part, cut_after=1000, method="GET"))
    done = day.run(*words, *(() if words[1] == "ask" else ("--output", tmp_path / "out")))
    command = " ".join(words[:2]) if words[0] == "midus" else "upscale"
    last = done.err.splitlines()[-1]
    assert done.status == 1
    assert last.startswith(f"{command}: the connection broke while {fetched} was being fetched (")
    assert last.endswith("Files that have come whole are kept: run the command again to fetch the rest.")
    assert "Traceback" not in done.err
    assert 'File "' not in done.err
    assert not [*tmp_path.iterdir()]


@product
@pytest.mark.parametrize("name", UPSCALED)
def test_base_of_the_hub(name, ends):
    ends(UPSCALED[name])


@product
@pytest.mark.parametrize("name", TRAINED)
def test_training_from_the_hub(name, ends, pushed):
    for model in {"me/hml", "me/hier"} & {*TRAINED[name].words}:
        pushed(model)
    ends(TRAINED[name])


@product
@pytest.mark.parametrize("name", READ)
def test_pushed_model_is_read(name, ends, pushed):
    for model in {"me/packs", "me/hml", "me/hier"} & {*READ[name].words}:
        pushed(model)
    ends(READ[name])


@product
@pytest.mark.parametrize("has_package", [True, False])
def test_pushed_memory_loads_as_its_folder(has_package, day, pushed):
    from_the_hub, from_the_folder = day.logits("me/hml", pushed("me/hml"), has_package=has_package)
    assert from_the_hub == from_the_folder


@product
def test_revision_is_the_one_that_is_named(ends):
    assert (ends(Case(upscaling(f"{BASE}@v1"))) / "LICENSE").read_text() == "licence of v1\n"


@product
def test_dry_run_downloads_no_weights(ends, day):
    day.hub.log.clear()
    ends(Case(upscaling(BASE, "--method", "midus-hml", "--set", "n=8", "--dry-run")))
    assert not [path for path in day.hub.downloaded(BASE) if path.endswith(".safetensors")]


@product
@pytest.mark.parametrize("lora", [(), ("--adapters", "{r: 2}")])
def test_trained_model_is_pushed_and_loads(lora, day, tmp_path):
    name, out = f"me/trained-{len(lora)}", tmp_path / "trained"
    words = TWO_STEPS if lora else ALL
    pushes = ("--push_to_hub", "true", "--hub_model_id", name, "--output", out)
    done = day.run(*training("org/texts", "--model", BASE, *lora, *words, *pushes), token=True)
    assert done.status == 0, done.err
    from_the_hub, from_the_folder = day.logits(name, out)
    assert from_the_hub == from_the_folder


@product
def test_comparison_of_a_base_of_the_hub(day, tmp_path):
    texts = {}
    for key, animal in (("domain", "otter"), ("validation", "lamp"), ("retention", "rain")):
        texts[key] = {key: str(tmp_path / f"{key}.txt")}
        (tmp_path / f"{key}.txt").write_text(f"The {animal} is in the hall of the north all night. " * 20)
    train = {"corpus": "org/texts", "sequence_length": 32, "max_steps": 2, "per_device_train_batch_size": 1}
    variants = {"pro": {"upscale": {"method": "llama-pro"}, "rates": [1e-3]}}
    plan = {"base": BASE, "output_dir": str(tmp_path / "compared"), "train": train, **texts}
    (tmp_path / "plan.yaml").write_text(
        yaml.safe_dump({**plan, "seeds": [0], "controls": False, "variants": variants})
    )
    done = day.run("midus", "compare", tmp_path / "plan.yaml")
    assert done.status == 0, done.err


@product
@pytest.mark.parametrize("status", [503, 429])
def test_busy_hub_is_asked_again(status, ends, faults):
    faults.append(Fault("safetensors", status=status, times=2))
    ends(Case(upscaling(BASE)))
