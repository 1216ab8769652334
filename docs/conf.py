"""Configuration of the site that `make docs` builds from the Markdown pages and the docstrings.

The source folder is the root of the repository, so that a relative link means the same on the site as in the repository. The
navigation has what the READMEs in `docs` link to, in their order; a page that none of them links to is an error.
"""

import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

from midus_hf.version import __version__

project = "midus_hf"
author = "The midus_hf authors"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
root_doc = "docs/README"
include_patterns = ["*.md", "docs/**", "experiments/*.md"]
exclude_patterns = [".*", "outputs", "build"]

html_theme = "furo"
html_title = project
html_copy_source = False
html_show_copyright = False
templates_path = ["_templates"]
html_additional_pages = {"index": "start.html"}  # the address of the site leads to its first page
highlight_language = "none"

myst_heading_anchors = 6

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
default_role = "code"  # docstrings write code in single backticks

# Every reference must resolve, except to things without a page: types of other projects (the site is built without a network), types
# of this project that occur in annotations but are not imported by users, and errors in lists of "Raises".
nitpicky = True
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(accelerate|collections|datasets|decimal|numpy|os|pathlib|peft|torch|transformers|trl|types|typing)\..*",
    ),
    (r"py:.*", r"(midus_hf|upscalers)\..*"),
    (r"py:exc", r"\w+Error|UnknownType"),
    (r"py:class", r"Dataset|PreTrainedTokenizerBase"),  # imported for types only
]


# In a README: links to pages beside it and to READMEs of folders below it.
PAGE = re.compile(r"\]\(((?:[\w-]+/README|(?!README)[\w-]+)\.md)[)#]")
# A heading, or the bold words that a line begins with.
CAPTION = re.compile(r"(?:#+ +|\*\*)(.+?)(?:\*\*.*)?")


def setup(app: Sphinx) -> None:
    app.connect("source-read", _add_navigation)
    app.connect("doctree-read", _unlink_folders)
    app.connect("autodoc-process-signature", _show_factories)
    app.connect("autodoc-process-docstring", _keep_first_line, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", _skip_fields_of_tuples)


def _add_navigation(app: Sphinx, docname: str, content: list[str]) -> None:
    """Add toctrees of the pages that a README in `docs` links to. The file has none, since GitHub would show them as code.

    The first page has a toctree for each of its sections, and one for the pages of the project.
    """
    if not re.fullmatch(r"docs/(.+/)?README", docname):
        return
    caption, listed = "", set()
    toctrees: dict[str, list[str]] = {}
    for line in content[0].splitlines():
        heading = CAPTION.fullmatch(line)
        if heading and docname == root_doc:
            caption = heading[1]
        for page in PAGE.findall(line):
            if page not in listed:
                listed.add(page)
                toctrees.setdefault(caption, []).append(page)
    if docname == root_doc:
        toctrees["Project"] = ["/README", "/*", "/experiments/*"]
    for caption, pages in toctrees.items():
        options = [f":caption: {caption}", ":glob:"] if caption else []
        content[0] += "\n".join(["", "```{toctree}", ":hidden:", *options, "", *pages, "```", ""])


def _unlink_folders(app: Sphinx, doctree: nodes.document) -> None:
    """Turn links to folders of the repository, which have no page, into text."""
    for link in list(doctree.findall(addnodes.pending_xref)):
        is_path = link.get("reftype") == "myst" and not link.get("refdomain")
        if is_path and (app.srcdir / link["refdoc"]).parent.joinpath(link["reftarget"]).is_dir():
            link.replace_self(link.children)


def _show_factories(app: Sphinx, kind: str, name: str, obj: Any, options: Any, *signature: str | None) -> Any:
    """Write `...` for a default that a dataclass makes by a factory: `<factory>` is no Python, which Sphinx would not parse."""
    arguments, returns = signature
    return (arguments.replace("<factory>", "..."), returns) if arguments else None


def _keep_first_line(app: Sphinx, kind: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Keep napoleon from reading the words before a colon as the type of an attribute, whose type is in its annotation.

    Napoleon reads only the first line so, which is now an empty comment.
    """
    if kind in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]


def _skip_fields_of_tuples(app: Sphinx, kind: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the fields of named tuples, which Python documents as "Alias for field number 0"."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field number") else None
