"""What a run of a comparison is asked for, what of that has changed, and what its result came from."""

import dataclasses
import json
import math
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from compare import made_results
from compare.made_results import result
from compare.small_comparison import SmallComparison, write_room

from midus_hf.compare import origins
from midus_hf.compare.origins import Inputs, base_digest, code, machine, short, text_digest
from midus_hf.compare.runs import Run, base_run, changed_keys, read_result, tokens_of, write_result
from midus_hf.compare.variants import Variant
from midus_hf.config.yaml_options import from_mapping
from midus_hf.training.arguments import TrainArguments
from midus_hf.version import __version__

VARIANT = Variant("hml", {"method": "midus-hml"}, {"corpus": "corpus", "max_steps": 10}, [{}])

comparison = partial(made_results.comparison, ["hml"])


def keys(variant: Variant = VARIANT, rate=None, **changes):
    return Run(variant, rate or {}, 3).training_keys(comparison(**changes), "model", Path("run"))


@pytest.mark.parametrize(
    ("train", "tokens"),
    [
        ({"max_steps": 10}, 10 * 8 * 2048),
        ({"max_steps": 1e1, "per_device_train_batch_size": 2, "sequence_length": 32}, 10 * 2 * 32),
        ({"max_steps": 3, "gradient_accumulation_steps": 4, "sequence_length": 16}, 3 * 4 * 8 * 16),
        ({"num_train_epochs": 1}, None),
        ({"max_steps": "many"}, None),
    ],
    ids=str,
)
def test_tokens_are_told_before_a_run(train, tokens):
    assert tokens_of(dataclasses.replace(VARIANT, train=train)) == tokens


def test_a_run_is_told_what_the_comparison_sets():
    assert keys() == {
        **{"corpus": "corpus", "model_name_or_path": "model", "output_dir": "run", "seed": 3, "max_steps": 10},
        **{"dataloader_drop_last": True, "eval_on_start": True, "eval_steps": 10},
        "eval_text": {"plants": "plants.txt", "stars": "stars.txt", "herbs": "herbs.txt"},
    }


@pytest.mark.parametrize(
    ("train", "every"),
    [
        ({"max_steps": 10}, 10),
        ({"max_steps": 1e2}, 100),
        ({"max_steps": 100.0, "eval_steps": None}, 100),
        ({"max_steps": 10, "eval_steps": 5}, 5),
        ({"max_steps": 10, "eval_steps": 4}, 4),  # the Trainer measures at the last step too
    ],
    ids=str,
)
def test_texts_are_measured_at_the_end_and_as_often_as_the_recipe_says(train, every):
    variant = dataclasses.replace(VARIANT, train={"corpus": "corpus", **train})
    assert from_mapping(TrainArguments, keys(variant)).eval_steps == every


OTHER_TRAIN = {"corpus": "other", "max_steps": 10, "per_device_train_batch_size": 2}


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ({}, []),
        ({"retention": {}}, ["train.eval_text.stars", "texts.stars"]),
        ({"domain": {"plants": "other.txt"}}, ["train.eval_text.plants", "texts.plants"]),
        ({"variant": {"upscale": {"method": "midus-hml", "options": {"n": 2}}}}, ["upscale.options"]),
        ({"variant": {"upscale": None}}, ["upscale"]),
        ({"variant": {"train": OTHER_TRAIN}}, ["train.corpus", "train.per_device_train_batch_size"]),
        # What a result does not depend on.
        ({"output_dir": "elsewhere", "seeds": [3, 4], "controls": False}, []),
        ({"variant": {"name": "b", "rates": [{}, {"learning_rate": 1.0}]}}, []),
    ],
    ids=str,
)
def test_what_has_changed_of_a_request_is_named(change, changed):
    variant = dataclasses.replace(VARIANT, **change.pop("variant", {}))
    before, now = Run(VARIANT, {}, 3).request(comparison()), Run(variant, {}, 3).request(comparison(**change))
    assert changed_keys(before, now) == changed
    # What is no mapping any more has changed as a whole.
    assert changed_keys({"a": {"b": 1}}, {"a": [1]}) == ["a"]
    assert changed_keys([1], [2]) == ["all"] and changed_keys([1], [1]) == []


def test_a_result_of_an_earlier_version_is_read_without_what_is_no_longer_kept(tmp_path):
    report = result("a", [0.5], [0.25])
    write_result(tmp_path / "seed-0", report)
    older = json.loads((tmp_path / "seed-0.json").read_text()) | {"seeds": 3}
    older["curve"] = [{**point, "tokens": 512} for point in older["curve"]]
    (tmp_path / "seed-0.json").write_text(json.dumps(older))
    assert read_result(tmp_path / "seed-0") == report
    (tmp_path / "seed-1.json").mkdir()
    assert read_result(tmp_path / "seed-1") is None and read_result(tmp_path / "absent" / "seed-0") is None


PUBLISHED = Path(__file__).parents[2] / "experiments" / "results" / "smollm2-135m-instruct" / "runs"


def test_published_results_are_read_and_belong_to_the_comparison_that_made_them(tmp_path):
    files = sorted(PUBLISHED.rglob("*.json"))
    results = [read_result(path.with_suffix("")) for path in files]
    assert len(files) == 26 and all(math.isfinite(loss) for one in results for loss in one.losses.values())
    (full,) = [one for one in results if one.variant == "full" and one.rate == {"learning_rate": 1e-4}]
    request = full.request
    own = ("model_name_or_path", "output_dir", "seed", "eval_steps", "eval_text", "eval_on_start", "learning_rate")
    train = {key: value for key, value in request["train"].items() if key not in own and key != "dataloader_drop_last"}
    texts = request["texts"]
    kinds = {"domain": "addresses", "retention": "articles", "validation": "other_addresses"}
    one = comparison(base=request["base"], train=train, **{kind: {name: texts[name]} for kind, name in kinds.items()})
    assert changed_keys(full.request, Run(Variant("full", None, train, []), full.rate, 0).request(one)) == []


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    return write_room(tmp_path_factory.mktemp("room"))


def test_the_digest_of_a_folder_is_that_of_its_files_and_their_names(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "2.txt").write_text("two")
        (tmp_path / name / "inner" / "1.txt").write_text("one")
    before = text_digest(str(tmp_path / "a"))
    assert before == text_digest(str(tmp_path / "b"))
    (tmp_path / "a" / "2.txt").rename(tmp_path / "a" / "3.txt")
    (tmp_path / "b" / "2.txt").write_text("too")
    assert len({before, text_digest(str(tmp_path / "a")), text_digest(str(tmp_path / "b"))}) == 3
    # A file counts by its bytes, and what is no path by its name.
    assert text_digest(str(tmp_path / "a" / "inner" / "1.txt")) == text_digest(str(tmp_path / "b" / "inner" / "1.txt"))
    assert text_digest("owner/corpus") != text_digest("owner/other")


def test_the_base_counts_by_its_weights_and_its_config(room):
    base = room / "base"
    before = base_digest(str(base))
    (base / "notes.txt").write_text("not read")
    assert base_digest(str(base)) == before
    for name in ("config.json", "tokenizer_config.json"):
        usual = (base / name).read_text()
        (base / name).write_text(usual + " ")
        assert base_digest(str(base)) != before
        (base / name).write_text(usual)


def test_each_text_is_read_once_for_all_variants(room, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(origins, "text_digest", lambda path: read.append(path) or path)
    comparing = SmallComparison(room, tmp_path, {"a": {}, "b": {"train": {"corpus": str(room / "corpus" / "1.txt")}}})
    inputs = Inputs(comparing.comparison)
    first, second = map(inputs.digests_for, comparing.variants)
    assert first["data"] != second["data"] and first["base"] == second["base"]
    assert inputs.digests_for(base_run(comparing.comparison).variant) == first
    assert sorted(read) == sorted(set(read)) and len(read) == 5


def test_a_result_says_with_what_it_was_made(room, tmp_path):
    comparing = SmallComparison(room, tmp_path, {"full": {}})
    base = comparing.measure_base()
    assert base.origin == {**comparing.inputs.digests_for(comparing.variants[0]), "code": code(), "machine": machine()}
    assert base.origin["machine"]["torch"] == torch.__version__
    assert base.origin["machine"]["transformers"] == transformers.__version__ and base.origin["machine"]["processor"]
    assert base.origin["code"]["version"] == __version__ and len(base.origin["code"]["sources"]) == 64


def test_the_code_of_a_repository_has_its_commit_and_whether_it_was_changed(tmp_path, monkeypatch):
    for name in ("midus_hf", "upscalers"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    monkeypatch.setattr(origins, "_ROOT", tmp_path)
    assert set(code()) == {"version", "sources"} and short("code", {"code": code()}).startswith(f"{__version__} (")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "m"]):
        subprocess.run([*git, *words], check=True)
    committed = code()
    assert len(committed["commit"]) == 40 and committed["changed"] is False
    (tmp_path / "upscalers" / "__init__.py").write_text("1")
    assert code() == {**committed, "changed": True, "sources": code()["sources"]} != committed

    def absent(*_, **__):
        raise FileNotFoundError("git")

    monkeypatch.setattr(origins.subprocess, "run", absent)
    assert set(code()) == {"version", "sources"}
