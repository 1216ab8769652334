"""Names of topics: those that look alike are one topic, and this is said."""

import json

import pytest
from datasets import Dataset

from midus_hf.topics.document_paths import TopicNames


def read(*names):
    return TopicNames.from_rows(Dataset.from_dict({"topic": names}), ["topic"])


@pytest.mark.parametrize("twin", ["Case law ", "Case\u00a0law", "Case law\u200b", "Case\u3000\uff4caw"])
def test_topics_that_look_alike_are_one(twin):
    with pytest.warns(UserWarning, match="^the topics 'Case law' and '.*' look alike and are one topic; write each"):
        topics = read("Case law", twin, "Music")
    assert [*topics.names] == ["Case law", "Music"]
    assert topics.paths({"topic": ["Music", twin, "Case law"]}).tolist() == [[1], [0], [0]]


def test_composed_names_are_one_topic():
    with pytest.warns(UserWarning, match=r"'Caf\\xe9' and 'Cafe\\u0301' look alike"):
        topics = read("Caf\u00e9", "Cafe\u0301")
    assert len(topics.names) == 1


def test_topics_of_other_case_are_two_and_named():
    with pytest.warns(UserWarning, match="the topics 'Law' and 'law' differ in case only and are two topics"):
        topics = read("Law", "law", "Lawn", "1", "01")
    assert len(topics.names) == 5


def test_earlier_trees_keep_topics_that_look_alike(tmp_path):
    (tmp_path / "topics.json").write_text(json.dumps({"columns": ["topic"], "names": {"Law": {}, "Law ": {}}}))
    topics = TopicNames.load(tmp_path)
    assert topics.paths({"topic": ["Law ", "Law"]}).tolist() == [[1], [0]]


def test_topic_of_invisible_characters_is_refused():
    with pytest.raises(ValueError, match=r"row 1 of .* has '\\u200b' under 'topic'; expected the name of its topic"):
        read("\u200b")
