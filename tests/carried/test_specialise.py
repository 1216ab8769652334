"""Partial evaluation of source: what facts decide goes, the rest stays as it is written, and computes the same."""

import ast
import itertools
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midus_hf.carried.specialise import specialise, with_short_docstrings, without_bare_annotations

FACTS = {"YES": True, "NO": False, "NONE": None, "self.options.routing": "chunk", "self.k": 3}


def specialised(source: str) -> str:
    return specialise(dedent(source), FACTS)


def branches(*tests: str, otherwise: bool) -> str:
    """An `if` with an `elif` for each further test; each branch calls a function of its own."""
    lines = [f"{'elif' if number else 'if'} {test}:\n    f{number}()\n" for number, test in enumerate(tests)]
    return "".join(lines) + ("else:\n    last()\n" if otherwise else "")


@pytest.mark.parametrize("otherwise", [False, True])
@pytest.mark.parametrize(
    "tests", [tests for count in (1, 2, 3) for tests in itertools.product(("YES", "NO", "x"), repeat=count)]
)
def test_of_an_if_the_branches_stay_that_may_still_be_taken(tests, otherwise):
    kept = [(test, number) for number, test in enumerate(tests) if test != "NO"]
    decided = next((place for place, (test, _) in enumerate(kept) if test == "YES"), None)
    if decided is not None:
        kept = kept[: decided + 1]
    lines = []
    for place, (test, number) in enumerate(kept):
        head = "else" if test == "YES" else f"{'elif' if place else 'if'} {test}"
        lines.append(f"{head}:\n    f{number}()\n")
    if decided is None and otherwise:
        lines.append("else:\n    last()\n")
    expected = "".join(lines)
    if expected.startswith("else"):  # all that is left
        expected = dedent(expected.partition("\n")[2])
    assert specialised(branches(*tests, otherwise=otherwise)) == (expected or "pass\n")


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("a if YES else b", "a"),
        ("a if NO else b", "b"),
        ("a if x else b", "a if x else b"),
        ("a if x else b if YES else c", "a if x else b"),
        ("f(a if NONE else b, YES)", "f(b, YES)"),
        ("YES and x", "x"),
        ("x and YES", "x and True"),
        ("not x and YES", "not x"),
        ("x is y and YES", "x is y"),
        ("hasattr(x, 'y') and YES", "hasattr(x, 'y')"),
        ("x > y and YES", "x > y and True"),
        ("x and self.k and not NO", "x and True"),
        ("f(x) and YES", "f(x) and True"),
        ("a if x and YES else b", "a if x else b"),
        ("NO or x", "x"),
        ("NO and x", "False"),
        ("x and NO and y", "x and False"),
        ("x or YES or y", "x or True"),
        ("x and YES and y", "x and y"),
        ("YES and (x or y)", "(x or y)"),
        ("YES and z and (x or y)", "z and (x or y)"),
        ("z and YES and (x if y else w)", "z and (x if y else w)"),
        ("x or []", "x or []"),
        ("x or ()", "x or ()"),
        ("x or None", "x or None"),
        ("x and ''", "x and ''"),
        ("NO or {}", "{}"),
        ("x or self.k", "x or 3"),
        ("self.k or x", "3"),
        ("self.k and x", "x"),
        ("x and self.options.routing", "x and 'chunk'"),
        ("x or NONE", "x or None"),
        ("NONE or x", "x"),
        ("a if x or NONE else b", "a if x else b"),
        ("a if not (x or NONE) else b", "a if not (x) else b"),
        ("a if x or self.k else b", "a"),
        ("a if not NO else b", "a"),
        ("a if not x else b", "a if not x else b"),
        ("a if self.options.routing == 'chunk' else b", "a"),
        ("a if self.options.routing != 'chunk' else b", "b"),
        ("a if self.options.routing in ('prompt', 'token') else b", "b"),
        ("a if self.options.routing not in {'prompt', 'token'} else b", "a"),
        ("a if NONE is None else b", "a"),
        ("a if NONE is not None else b", "b"),
        ("a if 1 < self.k else b", "a"),
        ("a if self.k >= 4 else b", "b"),
        ("a if 1 < self.k < x else b", "a if 1 < self.k < x else b"),
        ("a if other.k >= 4 else b", "a if other.k >= 4 else b"),
        ("a if YES and x or NO else b", "a if (x) else b"),
        ("a if x or not NO else b", "a"),
        ("a if x and NO else b", "b"),
    ],
)  # fmt: skip
def test_of_an_expression_what_may_still_be_its_value_stays(expression, expected):
    assert specialised(f"value = {expression}\n") == f"value = {expected}\n"


def test_a_source_that_no_fact_is_about_stays_as_it_is():
    source = dedent(
        """
        # A comment.
        @decorated(  1 )
        def function( a,b ):   # unusual
            '''Docstring.'''
            if a :

                return  b
            else: return a
        """
    )
    assert specialise(source, FACTS) == source


WHOLE = {
    "comments stay with the statements that stay and go with those that go": (
        """
        def function(x):
            # Why this is done at all.
            if YES:
                # Why it is done so.
                first()  # for now
                # What comes then.
                second()
            # Never done.
            if NO:
                # Nor this.
                third()
            # Done otherwise.
            if NO:
                fourth()
            else:
                # Why else.
                fifth()
            return x
        """,
        """
        def function(x):
            # Why this is done at all.
            # Why it is done so.
            first()  # for now
            # What comes then.
            second()
            # Done otherwise.
            # Why else.
            fifth()
            return x
        """,
    ),
    "branches within branches are resolved as well": (
        """
        def function(x):
            for each in x:
                if YES:
                    if x:
                        if NO:
                            a()
                        elif YES:
                            with b():
                                if YES:
                                    c()
                        else:
                            d()
                else:
                    e()
        """,
        """
        def function(x):
            for each in x:
                if x:
                    with b():
                        c()
        """,
    ),
    "what stands behind a return goes": (
        """
        def function(x):
            if x:
                if YES:
                    raise ValueError(x)
                f()
            if self.options.routing == "chunk":
                return (
                    g(x)
                )
            # The other way.
            for each in x:
                h(each)
            return None
        """,
        """
        def function(x):
            if x:
                raise ValueError(x)
            return (
                g(x)
            )
        """,
    ),
    "local variables that nothing reads any more go": (
        """
        LIMIT = 3

        def function(x):
            # How wide it is.
            width = x.width
            height: int = x.height
            called = f(x)
            global counted
            counted = x
            if NO:
                g(width, height, called)
            kept = x
            return lambda: kept
        """,
        """
        LIMIT = 3

        def function(x):
            called = f(x)
            global counted
            counted = x
            kept = x
            return lambda: kept
        """,
    ),
    "a loop with nothing left in it goes, unless its iterable is a call or its variable is read behind it": (
        """
        def function(x):
            for each in x:
                if NO:
                    f(each)
            for of_call in f(x):
                if NO:
                    g(of_call)
            for last in x:
                if NO:
                    f(last)
            return last
        """,
        """
        def function(x):
            for of_call in f(x):
                pass
            for last in x:
                pass
            return last
        """,
    ),
    "a branch in the line of its test is put into a line of its own": (
        """
        def function(x):
            if YES: first(); second()
            if x: third()
            elif YES: fourth()
            if NO: fifth()
            else: sixth()  # at last
        """,
        """
        def function(x):
            first(); second()
            if x: third()
            else:
                fourth()
            sixth()  # at last
        """,
    ),
    "a block of which several statements go keeps what is left": (
        """
        def function(x):
            if x:
                unread = 1
                if NO:
                    f()
            else:
                if NO:
                    g()
                also_unread = 2
                # It stays.
                h()
        """,
        """
        def function(x):
            if x:
                pass
            else:
                # It stays.
                h()
        """,
    ),
}


@pytest.mark.parametrize(("source", "expected"), WHOLE.values(), ids=list(WHOLE))
def test_of_whole_functions_what_may_still_run_stays(source, expected):
    assert specialised(source) == dedent(expected)


@pytest.mark.parametrize("head", ["def function(x):", "for each in x:", "with x:", "if x:", "class Some:"])
def test_a_block_that_loses_all_it_has_says_pass(head):
    assert specialised(f"{head}\n    # Never.\n    if NO:\n        f()\n") == f"{head}\n    pass\n"


def test_text_that_is_not_ascii_is_cut_where_it_should():
    source = "def function(x):\n    a = f('Ä', '→') if YES else g('ö')  # ü\n    return a or 'é' if NO else 'ß'\n"
    assert specialised(source) == "def function(x):\n    a = f('Ä', '→')  # ü\n    return 'ß'\n"


def test_of_docstrings_the_first_paragraph_stays_with_equations_and_shapes():
    source = '''
    def function(a, b):
        """Return something.

        It is told at length.

        It is `c = a + b`, or a number.

        Args:
            a: `[B, T, D]`.
            b: A number.

        Raises:
            ValueError: If not.
        """
        return a


    def other(b):
        """Return another.

        Args:
            b: A number.
        """
        return b
    '''
    assert with_short_docstrings(dedent(source)) == dedent(
        '''
        def function(a, b):
            """Return something.

            It is `c = a + b`, or a number.

            Args:
                a: `[B, T, D]`.
                b: A number.
            """
            return a


        def other(b):
            """Return another."""
            return b
        '''
    )


def test_of_a_class_attributes_without_a_value_go_unless_they_are_fields():
    source = """
    class Some:
        # What it holds.
        held: int
        config: Any
        given: int = 3

        def method(self):
            self.held: int = 1
    """
    expected = """
    class Some:
        config: Any
        given: int = 3

        def method(self):
            self.held: int = 1
    """
    assert without_bare_annotations(dedent(source)) == dedent(expected)
    for fields in ("@dataclass(frozen=True)\nclass Some:\n", "class Some(NamedTuple):\n"):
        assert without_bare_annotations(f"{fields}    held: int\n") == f"{fields}    held: int\n"


NAMES = ("p", "q", "r", "s")

conditions = st.recursive(
    st.sampled_from(NAMES),
    lambda inner: st.one_of(
        inner.map(lambda one: f"not ({one})"),
        st.builds("({}) and ({})".format, inner, inner),
        st.builds("({}) or ({}) or ({})".format, inner, inner, inner),
        st.builds("{1} if {0} else ({2})".format, st.sampled_from(NAMES), st.sampled_from(NAMES), inner),
    ),
    max_leaves=4,
)
values = st.one_of(
    conditions,
    st.builds("({}) {} {}".format, conditions, st.sampled_from(["or", "and"]), st.sampled_from(["[]", "None", "7"])),
)
simple = st.one_of(
    values.map(lambda value: [f"done.append({value})"]),
    values.map(lambda value: ["# Noted.", f"local = {value}"]),
    st.just(["done.append(local)"]),
    st.just(["return done"]),
)


def indented(blocks: list[list[str]]) -> list[str]:
    return [f"    {line}" for block in blocks for line in block]


def blocks_of(inner: st.SearchStrategy) -> st.SearchStrategy:
    """Statements that have blocks of others."""
    block = st.lists(inner, min_size=1, max_size=3).map(indented)
    branches = st.lists(st.tuples(conditions, block), min_size=1, max_size=3)

    def written(parts: tuple) -> list[str]:
        cases, otherwise = parts
        lines = []
        for number, (test, body) in enumerate(cases):
            lines += [f"{'elif' if number else 'if'} {test}:", *body]
        return [*lines, "else:", *otherwise] if otherwise else lines

    return st.one_of(
        st.tuples(branches, st.none() | block).map(written),
        block.map(lambda body: ["for _ in range(2):", *body]),
    )


programs = st.lists(st.recursive(simple, blocks_of, max_leaves=8), min_size=1, max_size=5).map(
    lambda blocks: "\n".join(
        [
            f"def compute({', '.join(NAMES)}):",
            "    done = []",
            "    local = 0",
            *indented(blocks),
            "    return done",
            "",
        ]
    )
)


def test_what_is_kept_of_a_source_is_kept_for_its_facts_alone():
    source = "value = known or other\n"
    texts = [specialise(source, {"known": value}) for value in (True, 1, "1", 0, None)]
    assert texts == ["value = True\n", "value = 1\n", "value = '1'\n", "value = other\n", "value = other\n"]
    assert specialise(source, {}) == source
    assert specialise(source, {"unknown": True, "known": True, "known.part": 2}) == "value = True\n"


@settings(max_examples=200, deadline=None)
@given(programs, st.dictionaries(st.sampled_from(NAMES), st.sampled_from([False, True, None, 0, 3, "word"])))
def test_a_specialised_program_computes_the_same_where_the_facts_hold(program, facts):
    short = specialise(program, facts)
    results = []
    for source in (program, short):
        namespace: dict = {}
        exec(source, namespace)
        cases = itertools.product(*([facts[name]] if name in facts else [False, 5, True] for name in NAMES))
        results.append([namespace["compute"](*case) for case in cases])
    assert repr(results[0]) == repr(results[1])
    assert specialise(short, facts) == short
    tested = [node.test for node in ast.walk(ast.parse(short)) if isinstance(node, ast.If | ast.IfExp)]
    assert not any(isinstance(test, ast.Name) and test.id in facts for test in tested)
