"""Report docstrings that a newcomer would read twice: `python scripts/docstrings.py PATHS`.

A function's docstring opens with an imperative verb, a class's or property's with a noun phrase, and an argument's line says more
than the argument's name. The rules here are the part of CONTRIBUTING.md's "How it reads" that a program can check.
"""

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# A verb that is missing here is added here: the list exists because a program cannot tell "Rows of a bank." from "Read a bank.".
VERBS = frozenset(
    """
    Accept Accumulate Add Adjust Advance Allocate Allow Announce Answer Append Apply Arrange Ask Assert Assign Attach Attend
    Average Backpropagate Begin Bind Bound Break Bring Broadcast Build Cache Call Cancel Capture Carry Cast Catch Change
    Check Choose Clamp Clean Clear Clip Close Cluster Collect Combine Compare Compile Complete Compress Compute Concatenate
    Configure Connect Construct Continue Convert Copy Count Cover Create Cut Decide Declare Decode Decompose Decompress
    Define Delay Delete Dequantise Derive Descend Describe Detach Detect Determine Digest Dispatch Display Divide Do
    Download Draw Drop Embed Emit Encode End Enlarge Ensure Enter Enumerate Erase Estimate Evaluate Exchange Exclude Execute
    Exit Expand Explain Export Expose Extend Extract Fail Fetch Fill Filter Find Fine-tune Finish Fit Flatten Flush Fold
    Follow Forbid Force Forget Format Forward Free Freeze Fuse Gather Generate Get Give Go Group Guard Guess Handle Have
    Hide Hold Hook Identify Ignore Import Include Increment Index Infer Initialise Initialize Insert Inspect Install
    Interpret Interrupt Invert Iterate Join Judge Keep Label Launch Lay Leave Let Limit Link List Load Locate Lock Log Look
    Lower Make Map Mark Mask Match Materialise Measure Merge Mirror Mix Modify Move Multiply Name Normalise Note Notice
    Number Observe Offer Omit Open Order Overlap Override Overwrite Pack Pad Paint Parse Partition Pass Patch Pause Perform
    Permute Pick Pin Place Plan Plot Point Prefer Prefix Prepare Preserve Pretend Pretrain Prevent Print Process Produce
    Profile Project Promise Propagate Protect Prove Prune Publish Put Quantise Queue Raise Randomise Rank Read Rebuild
    Receive Recognise Recompute Reconstruct Record Recover Reduce Refer Refuse Register Reject Release Reload Remember
    Remove Rename Render Reorder Repeat Replace Replay Report Represent Reproduce Request Require Reserve Reset Reshape
    Resize Resolve Restore Restrict Resume Retrieve Return Reuse Reverse Rewrite Rotate Round Route Run Sample Save Say
    Scale Scan Scatter Schedule Score Search Seed Select Send Separate Serialise Serve Set Share Shift Shorten Show Shrink
    Shuffle Shut Sign Simulate Skip Slice Smooth Solve Sort Split Stack Start State Stay Stop Store Stream Strip Subtract
    Suggest Sum Summarise Suppress Swap Switch Synchronise Take Tell Test Tie Time Tokenise Tokenize Trace Track Train
    Transfer Transform Translate Transpose Treat Trim Truncate Try Turn Undo Unpack Unregister Unwrap Update Upload Upscale
    Use Validate Verify Visit Wait Walk Warm Warn Watch Weigh Widen Withdraw Wrap Write Yield Zero
    """.split()
)
# These open a clause, never the noun phrase that names what a class or a property is.
CLAUSES = frozenset(
    "What How Whether Where Which That Those Of As For By With When If In On At From To It Its Both While Why So".split()
)
PLURALS = "rows|slots|keys|values|heads|experts|blocks|queries|tokens|chapters"
PHRASES = {
    r"\bthat there (are|is)\b": "name the things themselves",
    r"\bof it\b": "say the noun again",
    r"\bof its own\b": "use 'its own X' or 'a separate X'",
    r"\bsuch(?! as\b)": "say the noun again",
    r"\bthose (that|of|which|who|where|in|with|for)\b": "say the noun again",
    r"\bwhat [\w' ]{1,30} makes? of\b": "say 'the result of'",
    rf"\b({PLURALS}) a (head|token|layer|row|block|slot|step)\b": "write 'per'",
}
VAGUE_NAMES = frozenset({"asked", "found", "given", "place", "said", "told", "what", "whose", "words"})
LEAST_WORDS = 3

Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Finding:
    """A sentence or name that breaks a rule.

    Args:
        path: The source file.
        line: Line number in the file, from 1.
        message: What is wrong, and what to write instead.
    """

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def check_file(path: Path) -> list[Finding]:
    """Return the findings of one Python file, in the order of its lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    findings = []
    for node in ast.walk(tree):
        if isinstance(node, Documented):
            findings += [
                Finding(path, node.lineno, f"{node.name}: {message}") for message in _docstring_findings(node)
            ]
        if isinstance(node, ast.Module):
            findings += [Finding(path, 1, message) for message in _phrase_findings(ast.get_docstring(node) or "")]
        findings += [
            Finding(path, line, "a string after an assignment; write a comment above it") for line in _strings(node)
        ]
        name = _bound_name(node)
        if name in VAGUE_NAMES:
            findings.append(Finding(path, node.lineno, f"'{name}' names a variable; name what the variable holds"))
    return sorted(findings, key=lambda finding: finding.line)


def python_files(paths: list[Path]) -> Iterator[Path]:
    """Yield the Python files among `paths` and inside the folders among `paths`, sorted per path."""
    for path in paths:
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def _strings(node: ast.AST) -> Iterator[int]:
    """Yield the lines of strings that stand after assignments in the body of a node."""
    body = getattr(node, "body", None)
    for first, second in itertools.pairwise(body) if isinstance(body, list) else ():
        is_text = (
            isinstance(second, ast.Expr)
            and isinstance(second.value, ast.Constant)
            and isinstance(second.value.value, str)
        )
        if isinstance(first, ast.Assign | ast.AnnAssign) and is_text:
            yield second.lineno


def _docstring_findings(node: Documented) -> Iterator[str]:
    """Yield what is wrong with the docstring of one function or class, if it has a docstring."""
    docstring = ast.get_docstring(node)
    if not docstring:
        return
    opening = re.match(r"[\w-]*", docstring).group()
    if isinstance(node, ast.ClassDef) or _is_property(node):
        if opening in CLAUSES:
            yield f"the docstring opens with '{opening}'; expected a noun phrase"
    elif opening not in VERBS:
        yield f"the docstring opens with '{opening}'; expected an imperative verb (VERBS in {Path(__file__).name} lists them)"
    yield from _phrase_findings(docstring)
    yield from _argument_findings(docstring)


def _phrase_findings(docstring: str) -> Iterator[str]:
    """Yield the phrases of a docstring that have to be read twice."""
    flat = " ".join(docstring.split())
    for pattern, remedy in PHRASES.items():
        for match in re.finditer(pattern, flat, re.IGNORECASE):
            yield f"'{match.group()}' in the docstring; {remedy}"


def _argument_findings(docstring: str) -> Iterator[str]:
    """Yield the arguments whose line says nothing that the name does not say."""
    section = re.search(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)*)", docstring, re.MULTILINE)
    if not section:
        return
    for entry in re.finditer(r"^    (\S[^:]*): (.*(?:\n      +.*)*)", section.group(1), re.MULTILINE):
        description = entry.group(2).split()
        opening = re.match(r"[\w-]*", entry.group(2)).group()
        if len(description) < LEAST_WORDS or opening in {"Of", "As", "That", "Which", "By", "From", "Its", "Those"}:
            text = " ".join(description)
            yield f"argument {entry.group(1)}: '{text}'; say shape, unit, default and meaning, or leave the line out"


def _bound_name(node: ast.AST) -> str | None:
    """Return the name that an assignment or a parameter binds, or None."""
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return None


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a decorator makes the function a property."""
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def main(arguments: list[str]) -> int:
    """Print every finding of the files and folders in `arguments`, and return 1 if there is one, else 0."""
    findings = [
        finding for path in python_files([Path(argument) for argument in arguments]) for finding in check_file(path)
    ]
    for finding in findings:
        print(finding)
    print(f"{len(findings)} findings", file=sys.stderr)
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
