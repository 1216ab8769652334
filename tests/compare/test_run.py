"""What a run of a comparison is asked for, its result as a file, and the digests of what it reads."""

import dataclasses
import json
import math
import subprocess
from functools import partial
from pathlib import Path

import pytest
from compare import fake_results
from compare.fake_results import result
from compare.small_comparison import SmallComparison, write_room

from midus_hf.compare import run as run_module
from midus_hf.compare.plan import Run, Variant
from midus_hf.compare.run import code_version, hash_base, hash_text, read_result, request_of, stages_of, write_result
from midus_hf.config.errors import RequestError
from midus_hf.config.yaml_options import from_mapping
from midus_hf.training.arguments import TrainArguments
from midus_hf.version import __version__


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    return write_room(tmp_path_factory.mktemp("room"))


VARIANT = Variant("hml", {"method": "midus-hml"}, {"corpus": "corpus", "max_steps": 10}, [{}])

comparison = partial(fake_results.comparison, ["hml"])


def keys(variant: Variant = VARIANT, rate=None, **changes):
    return Run(variant, rate or {}, 3).training_keys(comparison(**changes), "model", "run")


def test_training_keys_have_what_the_comparison_sets():
    assert keys() == {
        **{"corpus": "corpus", "model_name_or_path": "model", "output_dir": "run", "seed": 3, "max_steps": 10},
        **{"dataloader_drop_last": True, "eval_on_start": True, "eval_steps": 10},
        "eval_text": {"plants": "plants.txt", "stars": "stars.txt", "herbs": "herbs.txt"},
    }


@pytest.mark.parametrize(
    ("train", "every"),
    [
        ({"max_steps": 1e2}, 100),
        ({"max_steps": 100.0, "eval_steps": None}, 100),
        ({"max_steps": 10, "eval_steps": 4}, 4),  # the Trainer measures at the last step too
    ],
    ids=str,
)
def test_texts_are_measured_at_the_end_or_as_the_recipe_says(train, every):
    variant = dataclasses.replace(VARIANT, train={"corpus": "corpus", **train})
    assert from_mapping(TrainArguments, keys(variant)).eval_steps == every


def test_older_result_is_read_without_unknown_fields(tmp_path):
    report = result("a", [0.5], [0.25])
    write_result(tmp_path / "seed-0", report)
    older = json.loads((tmp_path / "seed-0.json").read_text()) | {"controls": {"one-row": {}}}
    older["curve"] = [{**point, "tokens": 512} for point in older["curve"]]
    (tmp_path / "seed-0.json").write_text(json.dumps(older))
    assert read_result(tmp_path / "seed-0") == report
    (tmp_path / "seed-1.json").mkdir()
    assert read_result(tmp_path / "seed-1") is None and read_result(tmp_path / "absent" / "seed-0") is None


PUBLISHED = Path(__file__).parents[2] / "experiments" / "results" / "smollm2-135m-instruct" / "runs"


def test_published_results_belong_to_their_comparison():
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
    assert request_of(Run(Variant("full", None, train, []), full.rate, 0), one).items() <= request.items()


def test_digest_of_a_folder_covers_files_and_their_names(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "2.txt").write_text("two")
        (tmp_path / name / "inner" / "1.txt").write_text("one")
    before = hash_text(str(tmp_path / "a"))
    assert before == hash_text(str(tmp_path / "b"))
    (tmp_path / "a" / "2.txt").rename(tmp_path / "a" / "3.txt")
    (tmp_path / "b" / "2.txt").write_text("too")
    assert len({before, hash_text(str(tmp_path / "a")), hash_text(str(tmp_path / "b"))}) == 3
    # A file counts by its bytes, and what is no path by its name.
    assert hash_text(str(tmp_path / "a" / "inner" / "1.txt")) == hash_text(str(tmp_path / "b" / "inner" / "1.txt"))
    assert hash_text("owner/corpus") != hash_text("owner/other")


def test_digest_of_a_base_covers_weights_config_and_tokenizer(room):
    base = room / "base"
    before = hash_base(str(base))
    (base / "notes.txt").write_text("not read")
    assert hash_base(str(base)) == before
    for name in ("config.json", "tokenizer_config.json"):
        usual = (base / name).read_text()
        (base / name).write_text(usual + " ")
        assert hash_base(str(base)) != before
        (base / name).write_text(usual)


def test_each_text_is_read_once_for_all_variants(room, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(run_module, "hash_text", lambda path: read.append(path) or path)
    comparing = SmallComparison(room, tmp_path, {"a": {}, "b": {"train": {"corpus": str(room / "corpus" / "1.txt")}}})
    first, second = map(comparing.digests_for, comparing.variants)
    assert first["data"] != second["data"] and first["base"] == second["base"]
    assert comparing.digests_for(stages_of(comparing.comparison, [])[0][0].variant) == first
    assert sorted(read) == sorted(set(read)) and len(read) == 5


def test_result_has_the_origin_of_its_numbers(room, tmp_path):
    comparing = SmallComparison(room, tmp_path, {"full": {}})
    digests = comparing.digests_for(comparing.variants[0])
    assert comparing.measure_base().origin == {**digests, "code": code_version()}


def test_loss_that_is_not_finite_is_no_result(room, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "_measure_texts", lambda *_: {"plants": math.nan})
    with pytest.raises(RequestError, match=r"losses ended at .*nan.*; expected finite numbers. Lower the rate"):
        SmallComparison(room, tmp_path, {"full": {}}).measure_base()
    assert not list(tmp_path.rglob("*.json"))


def test_corpus_without_a_batch_is_no_result(room, tmp_path):
    comparing = SmallComparison(room, tmp_path, {"full": {}}, train={"per_device_train_batch_size": 10**4})
    with pytest.raises(RequestError, match=r"after 0 of 4 steps.*expected more text, or a smaller per_device"):
        comparing.measure(comparing.runs()[0])


def test_code_of_a_clone_has_its_commit(tmp_path, monkeypatch):
    (tmp_path / "midus_hf" / "compare").mkdir(parents=True)
    monkeypatch.setattr(run_module, "__file__", str(tmp_path / "midus_hf" / "compare" / "run.py"))
    assert code_version() == __version__
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "midus_hf" / "__init__.py").write_text("")
    subprocess.run([*git, "init", "-q"], check=True)
    assert code_version() == __version__, "without a commit"
    for words in (["add", "."], ["commit", "-q", "-m", "m"]):
        subprocess.run([*git, *words], check=True)
    committed = code_version()
    assert len(committed) == len(f"{__version__} ()") + 40
    (tmp_path / "midus_hf" / "__init__.py").write_text("1")
    assert code_version() == f"{committed[:-1]}-dirty)"
