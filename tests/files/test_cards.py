"""Results in a card's metadata are left out, and all else stays byte for byte."""

import pytest
from huggingface_hub import ModelCard

from midus_hf.files.cards import without_results

RESULTS = "model-index:\n- name: x\n  results:\n  - task: {type: a}\n\n# a comment\n    metrics: []\n"


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    ("before", "results", "after"),
    [
        ("license: mit\n", RESULTS, "tags:\n- a\n"),
        ("", RESULTS, ""),
        ("a: model-index\n", '"model-index": []\n', "b: 1\n"),
        ("", "'model-index' : [\n  {name: x}]\n", "b: ü\n"),
    ],
)
def test_card_results_are_left_out_with_a_note(before, results, after, newline, capsys):
    body = "# Title\n---\nmodel-index:\n- of the text\n---\n"
    with_results, without = (
        f"---\n{before}{middle}{after}---\n{body}".replace("\n", newline) for middle in (results, "")
    )
    assert without_results(with_results, "training") == without
    said = "results in the card's metadata are left out, since they were measured before training\n"
    assert capsys.readouterr().err == said
    assert ModelCard(with_results.replace(newline, "\n"), ignore_metadata_errors=True).text == body


@pytest.mark.parametrize("card", ["", "model-index:\n", "---\na: 1\n---\nmodel-index:\n- x\n", "---\nmodel-index:\n"])
def test_card_without_results_is_unchanged(card, capsys):
    assert without_results(card, "training") == card
    assert not capsys.readouterr().err
