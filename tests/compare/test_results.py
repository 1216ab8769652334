"""Results as files: what was measured comes back as it was, whole or not at all."""

import json

from compare.made_results import DOMAIN, RETENTION, result

from midus_hf.compare.results import Measured, Result, read_result, write_result


def test_a_result_comes_back_as_it_was(tmp_path):
    tuned = Measured({DOMAIN: 2.0, RETENTION: 1.0}, {"piqa": {"acc": 0.5}})
    for told in (
        result("a", [0.5], [0.25], shuffled={DOMAIN: 3.0}),
        result("a", [], seed=2, tuned=tuned),
        Result("base", {}, 0, []),
    ):
        write_result(tmp_path, told)
        assert read_result(tmp_path) == told
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_what_earlier_results_do_not_say_is_not_known(tmp_path):
    write_result(tmp_path, result("a", [0.5]))
    values = json.loads((tmp_path / "result.json").read_text())
    del values["unshuffled"], values["tuned"], values["new_parameters"]
    (tmp_path / "result.json").write_text(json.dumps(values))
    found = read_result(tmp_path)
    assert (found.unshuffled, found.tuned, found.new_parameters) == (None, None, 0)


def test_without_a_file_there_is_no_result(tmp_path):
    (tmp_path / "result.json").mkdir()
    assert read_result(tmp_path) is None and read_result(tmp_path / "absent") is None


def test_the_end_is_that_of_training_or_of_fine_tuning():
    tuned = Measured({DOMAIN: 1.0}, {})
    run = result("a", [0.25, 0.5], tasks={"piqa": {"acc": 0.5}}, tuned=tuned)
    assert run.end_of(tuned=False) == Measured({DOMAIN: 2.5, RETENTION: 2.0}, {"piqa": {"acc": 0.5}})
    assert run.end_of(tuned=True) is tuned and result("a", [0.5]).end_of(tuned=True) is None
    # A comparison by tasks alone has no curve.
    assert Result("a", {}, 0, [], tasks={"piqa": {}}).end_of(tuned=False) == Measured({}, {"piqa": {}})
