"""Build the wheel and the sdist, and try both in clean environments: `python scripts/release_check.py [--pythons 3.11,3.12,3.13]`.

Every environment installs the wheel or the sdist with the versions of `constraints.txt`, or sees the packages of `--oldest`, and
runs the same steps in an empty folder: upscale a small model, load it with the package and without, generate, strip, and compare
the base's bytes; where the extras are installed, train and evaluate as well. A wheel that was built without a C compiler is tried
too: its native code is built at first use, or PyTorch computes instead. If all passed, the files are in `dist/`, with a list of the
packages that the wheel was tried with (SBOM, CycloneDX), and the commands that sign and publish them are printed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEPS = """
import subprocess, sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
                     num_key_value_heads=2, bos_token_id=1, eos_token_id=2)
LlamaForCausalLM(config).save_pretrained("base")
bin = Path(sys.executable).parent

def run(*words):
    done = subprocess.run([bin / words[0], *words[1:]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout

run("upscale", "--base", "base", "--method", "midus-hml", "--num-new-layers", "2", "--output", "upscaled")
assert "--model_name_or_path" in run("midus", "train", "--help")
assert "midus-hml" in run("upscale", "methods")
tokens = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
expected = LlamaForCausalLM.from_pretrained("base").generate(tokens, max_new_tokens=8, do_sample=False)
alone = '''
import sys
sys.modules["midus_hf"] = None
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("upscaled", trust_remote_code=True)
torch.save(model.generate(torch.load("tokens.pt"), max_new_tokens=8, do_sample=False), "alone.pt")
'''
torch.save(tokens, "tokens.pt")
subprocess.run([sys.executable, "-c", alone], check=True)
assert torch.equal(torch.load("alone.pt"), expected)
import midus_hf
assert Path(midus_hf.__file__).is_relative_to(Path(sys.prefix).resolve()), midus_hf.__file__
model = AutoModelForCausalLM.from_pretrained("upscaled")
assert type(model).__module__.startswith("midus_hf."), type(model)
assert torch.equal(model.generate(tokens, max_new_tokens=8, do_sample=False), expected)
trained = "upscaled"
if len(sys.argv) > 1:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2").save_pretrained("upscaled")
    Path("texts.txt").write_text(" ".join(f"w{3 + number * number % 61}" for number in range(2000)))
    run("midus", "train", "texts.txt", "--model", "upscaled", "--output", "trained", "--max_steps=2", "--sequence_length=16")
    assert "perplexity" in run("midus", "eval", "upscaled", "trained", "--text", "texts.txt", "--sequence-length", "16")
    trained = "trained"
run("upscale", "strip", trained, "--output", "again")
assert Path("again/model.safetensors").read_bytes() == Path("base/model.safetensors").read_bytes()
"""
# Extras of the environment that trains and evaluates.
EXTRAS = "train,eval"
SBOM_TOOL = "cyclonedx-bom==7.5.0"


def build(folder: Path, with_compiler: bool) -> Path:
    """Build the wheel, and with a compiler the sdist as well, and return the path of the wheel."""
    shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(".*", "outputs", "build", "*.egg-info"))
    kinds = ["--sdist", "--wheel"] if with_compiler else ["--wheel"]
    command = [sys.executable, "-m", "build", *kinds, "--outdir", str(folder / "dist"), str(folder / "source")]
    subprocess.run(command, check=True, env=environment(folder, with_compiler), stdout=subprocess.DEVNULL)
    (wheel,) = (folder / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert any(name.endswith(".so") for name in names) == with_compiler, (
        "native code is in the wheel if it can be compiled"
    )
    return wheel


def environment(folder: Path, with_compiler: bool) -> dict[str, str]:
    """Return environment variables; without a compiler, the search path has only Python and the shell's tools."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_USER"))}
    if with_compiler:
        return variables
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("sh", "bash", "env", "uname", "ls", "cat", "ldconfig", "sed", "git"):
        if (path := shutil.which(name)) and not (tools / name).exists():
            (tools / name).symlink_to(path)
    return {**variables, "PATH": str(tools), "CC": "no-compiler-here"}


def try_package(
    package: Path, python: str, folder: Path, with_compiler: bool, oldest: Path | None, extras: str = ""
) -> None:
    """Install a wheel or an sdist in a new environment and run the steps there.

    Args:
        package: The wheel or the sdist.
        python: Python to make the environment with.
        folder: Folder for the environment.
        with_compiler: Whether the steps find a C compiler.
        oldest: Environment whose packages the new environment sees. None: packages of `constraints.txt` are installed.
        extras: Extras to install, with which the steps train and evaluate. Default: none.
    """
    subprocess.run([python, "-m", "venv", folder / "env"], check=True)
    own = folder / "env" / "bin" / "python"
    if oldest is None:
        for packages in (["torch"], [f"{package}[{extras}]" if extras else str(package)]):
            constraints = ["-c", str(ROOT / "constraints.txt")]
            subprocess.run([own, "-m", "pip", "install", "-q", *constraints, *packages], check=True)
    else:
        (site,) = oldest.glob("lib/python*/site-packages")
        (target,) = (folder / "env").glob("lib/python*/site-packages")
        (target / "seen.pth").write_text(f"{site}\n")
        subprocess.run(
            [own, "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed", str(package)], check=True
        )
    work = folder / "work"
    work.mkdir()
    # A separate cache, so that native code from an earlier environment is not used.
    variables = {**environment(folder, with_compiler), "XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([own, "-c", STEPS, *([extras] if extras else [])], check=True, cwd=work, env=variables)


def write_sbom(wheel: Path, env: Path, folder: Path) -> Path:
    """Write the packages of an environment that has the wheel as `WHEEL.cdx.json`, without paths of this machine; return its path."""
    tools = folder / "tools"
    path = folder / f"{wheel.stem}.cdx.json"
    subprocess.run([sys.executable, "-m", "venv", tools], check=True)
    subprocess.run([tools / "bin" / "python", "-m", "pip", "install", "-q", SBOM_TOOL], check=True)
    command = [
        tools / "bin" / "cyclonedx-py",
        "environment",
        env / "bin" / "python",
        "--output-reproducible",
        "-o",
        path,
    ]
    subprocess.run(command, check=True)
    sbom = json.loads(path.read_text(encoding="utf-8"))
    for component in sbom["components"]:
        links = component.get("externalReferences", [])
        component["externalReferences"] = [link for link in links if not link["url"].startswith("file:")]
    (sbom["metadata"]["component"],) = (each for each in sbom["components"] if each["name"] == "midus-hf")
    sbom["components"].remove(sbom["metadata"]["component"])
    path.write_text(json.dumps(sbom, indent=2) + "\n", encoding="utf-8")
    return path


def main() -> int:
    """Build, try every environment, print a line for each, and return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", default="3.11,3.12,3.13", help="versions of Python, separated by commas")
    parser.add_argument("--oldest", type=Path, help="environment with the oldest supported versions")
    arguments = parser.parse_args()
    status = 0
    with tempfile.TemporaryDirectory() as temporary:
        room = Path(temporary)
        wheels = {}
        for compiler in (True, False):
            (room / f"build-{compiler}").mkdir()
            wheels[compiler] = build(room / f"build-{compiler}", compiler)
            print(
                f"{wheels[compiler].name}: {wheels[compiler].stat().st_size:,} bytes, with a compiler: {compiler}",
                flush=True,
            )
        (sdist,) = wheels[True].parent.glob("*.tar.gz")
        first, *others = [f"python{version}" for version in arguments.pythons.split(",")]
        cases = [(wheels[True], first, True, None, EXTRAS), (sdist, first, True, None, "")]
        cases += [(wheels[True], other, True, None, "") for other in others]
        cases.append((wheels[False], first, False, None, ""))
        if arguments.oldest is not None:
            oldest_python = str(arguments.oldest / "bin" / "python")
            cases.append((wheels[True], oldest_python, True, arguments.oldest.absolute(), ""))
        for number, (package, python, compiler, oldest, extras) in enumerate(cases):
            folder = room / str(number)
            folder.mkdir()
            name = (
                f"{package.name}, {python}, {'oldest' if oldest else 'newest'} versions, with a compiler: {compiler}, "
                f"extras: {extras or 'none'}"
            )
            try:
                try_package(package, python, folder, compiler, oldest, extras)
            except (subprocess.CalledProcessError, FileNotFoundError) as error:
                status = 1
                print(f"FAILED {name}: {error}", flush=True)
            else:
                print(f"passed {name}", flush=True)
                if extras:
                    sbom = write_sbom(package, folder / "env", room)
            shutil.rmtree(folder)
        if status == 0:
            dist = ROOT / "dist"
            dist.mkdir(exist_ok=True)
            files = [str(Path("dist", Path(shutil.copy(each, dist)).name)) for each in (sdist, wheels[True], sbom)]
            version = wheels[True].name.split("-")[1]
            print(
                f"All passed. To sign and publish:\n  git tag -s v{version} -m v{version} && git push origin v{version}\n"
                f"  sigstore sign {' '.join(files)}\n  twine upload {' '.join(files[:2])}\n"
                f"  gh release create v{version} --verify-tag --draft {' '.join(files)} dist/*-{version}*.sigstore.json"
            )
    return status


if __name__ == "__main__":
    sys.exit(main())
