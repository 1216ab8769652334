"""What the default run leaves out, and that it leaves out nothing else."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pairs import keep_pairs


@dataclass
class Item:
    """A test as pytest collects it."""

    test: str
    params: dict[str, Any]
    chosen: list[str] = field(default_factory=list)

    @property
    def nodeid(self) -> str:
        return f"{self.test}[{'-'.join(map(str, self.params.values()))}]"

    @property
    def callspec(self) -> SimpleNamespace:
        return SimpleNamespace(params=self.params)

    def iter_markers(self, name: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(args=(names,)) for names in self.chosen]


def product(test: str, families: str, sizes: range, **more: Any) -> list[Item]:
    return [Item(test, {"family": family, "size": size}, **more) for family in families for size in sizes]


def test_every_family_and_every_other_parameter_stay():
    for sizes in (range(1), range(2), range(5), range(7)):
        kept = keep_pairs(product("test", "abcde", sizes))
        assert {item.params["family"] for item in kept} == set("abcde")
        assert {item.params["size"] for item in kept} == set(sizes)
        assert len(kept) == max(5, len(sizes))


def test_tests_are_thinned_out_each_for_itself():
    one, other = product("one", "abc", range(3)), product("other", "abc", range(1))
    assert len(keep_pairs([*one, *other])) == 3 + 3


def test_what_is_on_no_family_or_chooses_its_own_stays():
    plain = [Item("plain", {"size": size}) for size in range(4)]
    chosen = product("chosen", "abc", range(3), chosen=["size, family"])
    assert keep_pairs([*plain, *chosen]) == [*plain, *chosen]
