"""What a method's checks and plan read of a base on the Hub is there before the weights, and without them."""

import json

import pytest
from huggingface_hub import constants
from tiny import save_tiny_tokenizer

from midus_hf.cli.edit import list_memories
from midus_hf.compare.plan import Comparison, VariantOptions, plan
from midus_hf.config.errors import RequestError
from tests.upscalers.checkpoints import Recorder, save_base
from tests.upscalers.contents import same_tensors
from tests.upscalers.hub_server import Repository, files_of
from tests.upscalers.methods import KINDS, PLAIN, kind
from upscalers.edits.banks import delete, list_banks
from upscalers.edits.checkpoint_edit import EditRequest
from upscalers.edits.packs import add_entries
from upscalers.methods.contract import METHODS
from upscalers.runs.inspection import inspect_checkpoint
from upscalers.runs.upscale import upscale

ENGRAM = kind("engram", compress=True)
EXACT = {"method": "engram", "options": {"width": 16, "table": "exact", "min_order": 1}}
# Requests, and whether they have a corpus.
REQUESTS = {
    **{name: (KINDS[name], False) for name in PLAIN},
    "engram": (ENGRAM, False),
    "engram, exact": (EXACT, True),
    "packs": ({"method": "packs", "options": {}}, True),
}
# Names of the base, and what is on the Hub under them.
PLACES = {
    "the Hub": "org/base",
    "private": "org/private",
    "gated": "org/gated",
    "a revision": "org/moved@v1",
    "offline": "org/base",
}


def glossary(folder, name):
    """Write a row for a name, and return the file's path."""
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"name": name, "text": "word7 word8"}) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A base of several shards with a tokenizer."""
    folder = save_base(tmp_path_factory.mktemp("base") / "base", max_shard_size="60KB")
    save_tiny_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def made(local, tmp_path_factory):
    """Return a request by its name, and on the local base the dry run's report and the folder of the run."""
    folder, done = tmp_path_factory.mktemp("made"), {}
    corpus = glossary(folder, "word5")

    def request(name):
        keys, has_corpus = REQUESTS[name]
        read = {"corpus": corpus} if has_corpus else {}
        return {**keys, "options": {**keys.get("options", {}), **read}, "verify": False}

    def make(name):
        if name not in done:
            report = upscale(base=local, dry_run=True, **request(name))
            output = folder / str(len(done))
            upscale(base=local, output=output, **request(name))
            done[name] = (request(name), report, output)
        return done[name]

    return make


@pytest.fixture
def bases(hub, local, tmp_path):
    other = save_base(tmp_path / "other", initializer_range=0.5)
    files = files_of(local)
    hub.repositories |= {
        "org/base": Repository(files),
        "org/private": Repository(files, private=True),
        "org/gated": Repository(files, gated=True),
        "org/moved": Repository(files_of(other), tags={"v1": files}),
    }
    return hub


def weights_downloaded(hub):
    return [name for repository in hub.repositories for name in hub.downloaded(repository) if "safetensors" in name]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", REQUESTS)
def test_every_method_takes_a_base_of_the_hub(name, place, bases, made, tmp_path, monkeypatch):
    request, local_report, output = made(name)
    base = PLACES[place]

    def check(folder):
        report = upscale(base=base, dry_run=True, **request)
        assert (report.parameters, report.bytes) == (local_report.parameters, local_report.bytes)
        if folder == "out":
            assert weights_downloaded(bases) == []
        upscale(base=base, output=tmp_path / folder, **request)
        assert same_tensors(tmp_path / folder, output)

    check("out")
    if place == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        bases.log.clear()
        check("again")
        assert bases.requests == []


def test_table_has_every_method():
    own = {name for name, method in METHODS.items() if method.__module__.startswith("upscalers.")}
    assert {keys["method"] for keys, _ in REQUESTS.values()} == own


@pytest.mark.parametrize(("place", "said"), [("private", "Repository Not Found"), ("gated", "restricted|gated")])
def test_base_without_rights_is_refused(place, said, bases, made, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with pytest.raises(RequestError, match=rf"'{PLACES[place]}' is no local folder, and the Hub .*({said})"):
        upscale(base=PLACES[place], dry_run=True, **made("packs")[0])


@pytest.mark.parametrize("name", ["packs", "engram, exact"])
def test_base_without_tokenizer_is_refused_before_weights(name, bases, made):
    files = bases.repositories["org/base"].files
    bases.repositories["org/base"].files = {file: content for file, content in files.items() if "token" not in file}
    with pytest.raises(
        RequestError, match=r"^org/base@\w+ has no tokenizer, to .*\. Copy one into a folder of the base"
    ):
        upscale(base="org/base", output="out", **made(name)[0])
    assert weights_downloaded(bases) == []


def test_dry_run_warns_of_a_missing_tokenizer(bases, made):
    files = bases.repositories["org/base"].files
    bases.repositories["org/base"].files = {file: content for file, content in files.items() if "token" not in file}
    progress = Recorder()
    upscale(base="org/base", dry_run=True, progress=progress, **made("engram")[0])
    assert any("The base has no tokenizer" in warning for warning in progress.warnings)


REFUSED_BY_THE_WORK = {
    "protected texts": ("packs", {"protect": "rows.jsonl"}, "contain names of the glossary"),
    "layers": ("moc", {"layers": [99]}, "layers is"),
    "a span": ("ultramem-v2", {"site": "skip", "span": 9}, "span is 9; expected fewer than"),
}


@pytest.mark.parametrize("case", REFUSED_BY_THE_WORK)
def test_what_a_dry_run_refuses_is_refused_before_weights(case, bases, made, tmp_path):
    name, options, message = REFUSED_BY_THE_WORK[case]
    (tmp_path / "rows.jsonl").write_text('{"text": "word1 word5"}\n')
    request = made(name)[0]
    request = {**request, "options": {**request["options"], **options}}
    for words in ({"dry_run": True}, {"output": "out"}):
        with pytest.raises(RequestError, match=message):
            upscale(base="org/base", **words, **request)
    assert weights_downloaded(bases) == []


def test_adapter_on_the_hub_is_refused_before_weights(bases, made):
    bases.repositories["org/base"].files["adapter_config.json"] = b"{}"
    with pytest.raises(RequestError, match="holds a PEFT adapter"):
        upscale(base="org/base", output="out", **made("moc")[0])
    assert weights_downloaded(bases) == []


@pytest.mark.parametrize("name", ["packs", "engram, exact"])
def test_comparison_is_planned_without_weights(name, bases, made):
    request = made(name)[0]
    options = {**request["options"]}
    variant = VariantOptions(
        upscale={"method": request["method"], "corpus": options.pop("corpus"), "options": options}
    )
    train = {"corpus": "texts.txt", "max_steps": 1}
    _, (planned,) = plan(
        Comparison(base="org/base", output_dir="out", variants={"a": variant}, train=train, domain={"d": "d.txt"})
    )
    assert planned.new_parameters == made(name)[1].parameters.new
    assert weights_downloaded(bases) == []


def test_packs_on_the_hub_are_inspected_and_listed(bases, made):
    bases.repositories["me/packs"] = Repository(files_of(made("packs")[2]))
    assert inspect_checkpoint("me/packs")["entries"] == 1
    assert [entry["names"] for entry in list_memories("me/packs")["entries"]] == [["word5"]]
    assert weights_downloaded(bases) == []


def test_blocks_on_the_hub_are_listed_without_weights(bases, made):
    bases.repositories["me/blocks"] = Repository(files_of(made("hier-ffn")[2]))
    (listed,), (local,) = (list_banks(model)["banks"] for model in ("me/blocks", made("hier-ffn")[2]))
    for key in ("memory", "type", "branching", "fetched", "bank"):
        assert listed[key] == local[key]
    assert [level["nodes"] for level in listed["levels"]] == [level["nodes"] for level in local["levels"]]
    assert all(file.startswith("memory_bank/") for file in weights_downloaded(bases))


def test_edit_of_a_model_on_the_hub_carries_its_code(bases, made, tmp_path):
    folder = made("packs")[2]
    bases.repositories["me/packs"] = Repository(files_of(folder))
    add_entries(EditRequest("me/packs", tmp_path / "edited"), glossary(tmp_path, "word6"))
    assert files_of(tmp_path / "edited").keys() == files_of(folder).keys()
    assert (tmp_path / "edited" / "modeling_midus.py").read_bytes() == (folder / "modeling_midus.py").read_bytes()


def test_deletion_of_blocks_on_the_hub_reads_the_run(bases, made, tmp_path):
    folder = made("hier-ffn")[2]
    run = b"corpus: texts.jsonl\ntrainable: all\n"
    bases.repositories["me/blocks"] = Repository({**files_of(folder), "train_config.yaml": run})
    deleted = delete(EditRequest("me/blocks", tmp_path / "deleted"), ["1:0"])
    assert deleted["also_taught"]["weights"] is True
    assert "texts.jsonl" in deleted["copies"]
