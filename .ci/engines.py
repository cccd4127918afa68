"""Builds the environments of vLLM and SGLang that `make test-engines` uses, once for all clones of this machine.

They lie in $ASYNC_RL_ENGINES (default ~/.cache/async-rl/engines) as NAME-HASH, the hash being of all that decides
what is in them; .engines/NAME leads there. A built one has a file .ready in it, as old as its last use; one without is
a build that broke off, and is taken away by the next. When a new one is ready, those with other hashes that no clone
has used for two weeks are taken away.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PYTHON = (3, 11)  # what the listed versions were tried with; some have wheels for no other
KEPT_S = 14 * 86400.0  # another clone, or another branch of this one, may come back for it


class Environment(NamedTuple):
    """`shim`: a folder whose content goes beside the packages; `check` is run in it at the end."""

    name: str
    requirements: Path
    check: str
    shim: Path | None = None


VLLM_CHECK = """
import pytest, peft, torch, vllm
from transformers import Qwen3ForCausalLM
from vllm.platforms import current_platform

current_platform.import_kernels()  # those for this processor: to import another's by name is an illegal instruction
torch.ops._C.rms_norm
"""
ENVIRONMENTS = (
    Environment("vllm", ROOT / "requirements/vllm-cpu.txt", VLLM_CHECK),
    Environment(
        "sglang",
        ROOT / "requirements/sglang-cpu.txt",
        "import sglang.srt.server_args, torchvision; from transformers import Qwen3ForCausalLM",
        ROOT / "tests/engines/sglang_shim",
    ),
)


def main() -> None:
    if sys.version_info[:2] != PYTHON:
        wanted = ".".join(map(str, PYTHON))
        sys.exit(f"the engines' environments are for Python {wanted}, this is {sys.version.split()[0]}: "
                 f"make engines PYTHON=python{wanted}")  # fmt: skip
    cache = Path(os.environ.get("ASYNC_RL_ENGINES", Path.home() / ".cache/async-rl/engines")).resolve()
    links = ROOT / ".engines"
    for environment in ENVIRONMENTS:
        place(built(environment, cache), links / environment.name)


def built(environment: Environment, cache: Path) -> Path:
    """Its folder; builds it where there is none. Whoever else wants it meanwhile waits."""
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"{environment.name}-{hash_of(environment)}"
    with locked(cache / f"{environment.name}.lock"):
        if not (folder / ".ready").exists():
            build(environment, folder)
            for other in unused(environment, cache):
                remove(other)
        (folder / ".ready").touch()
    return folder


def unused(environment: Environment, cache: Path) -> list[Path]:
    """Those of this name that nobody has asked for of late. The user may have chosen a folder in which other things
    lie: what was not made here is none of them."""
    found = []
    for folder in cache.iterdir():
        made, ready = folder / "pyvenv.cfg", folder / ".ready"
        if re.fullmatch(rf"{environment.name}-[0-9a-f]{{16}}", folder.name) and made.exists():
            last = (ready if ready.exists() else made).stat().st_mtime
            if time.time() - last > KEPT_S:
                found.append(folder)
    return found


def remove(folder: Path) -> None:
    """What is left of it, if this breaks off, is not taken for whole."""
    (folder / ".ready").unlink(missing_ok=True)
    shutil.rmtree(folder)


def hash_of(environment: Environment) -> str:
    """Of its requirements, its shim, this file, and the Python that it is built with."""
    files = [environment.requirements, Path(__file__)]
    if environment.shim is not None:
        files += sorted(path for path in environment.shim.rglob("*.py"))
    digest = hashlib.sha256(f"{sys.version} {Path(sys.base_prefix).resolve()}".encode())
    for file in files:
        data = file.read_bytes()
        digest.update(f"{file.name} {len(data)}\n".encode() + data)
    return digest.hexdigest()[:16]


def build(environment: Environment, folder: Path) -> None:
    """Its last act says that it is whole. A venv cannot be moved, so it is made where it stays."""
    print(f"building the environment of {environment.name} in {folder}: some minutes, and some GB", flush=True)
    if folder.exists():
        remove(folder)
    python = folder / "bin/python"
    run(sys.executable, "-m", "venv", str(folder))
    run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "-r",
        str(environment.requirements))  # fmt: skip
    if environment.shim is not None:
        site = subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        )
        shutil.copytree(environment.shim, site.strip(), dirs_exist_ok=True)
    run(str(python), "-c", environment.check, SGLANG_USE_CPU_ENGINE="1", VLLM_LOGGING_LEVEL="ERROR")
    (folder / ".ready").touch()


def run(*words: str, **environment: str) -> None:
    """Ends this program where it fails: what it wrote says why."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    if code := subprocess.call(words, env=kept | environment):
        sys.exit(f"failed with code {code}: {' '.join(words)}")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def place(folder: Path, link: Path) -> None:
    """`link` leads to `folder`, at any moment to something whole."""
    link.parent.mkdir(exist_ok=True)
    new = link.with_suffix(".new")
    new.unlink(missing_ok=True)
    new.symlink_to(folder)
    new.replace(link)
    print(f"{link.relative_to(ROOT)} -> {folder}", flush=True)


if __name__ == "__main__":
    main()
