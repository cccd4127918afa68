"""`async-rl doctor CONFIG`: does each engine compute what the trainer computes? Without a run, by the same rules.

For each dtype the trainer's half (trainer.parity) makes the policies and scores the probe under them; then each group's
engine, one after the other (inference.parity), with the interpreter that has it. What comes out is compared here.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import tomli_w
from msgspec import UNSET
from rich.console import Console

from async_rl.config import Config, check_config, config_table
from async_rl.errors import AsyncRLError
from async_rl.inference_config import NodeGroup, interpreter, lives_elsewhere, node_groups
from async_rl.run import parity_files
from async_rl.run.checks import check_engines, check_installed, check_mixture, check_model, check_task
from async_rl.run.doctor_report import Report, Row, judged, name_of, page
from async_rl.run.launch import LaunchError, ProcessSpec
from async_rl.run.local import with_model
from async_rl.run.parity_files import Served, Trained
from async_rl.run.pools import Pools


class Workshop:
    """A folder for the two halves' files. It is kept when one of them failed or took too long, for its log."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="async-rl-doctor-"))
        self.keep = False

    def __enter__(self) -> Workshop:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.keep:
            shutil.rmtree(self.path, ignore_errors=True)

    def write_pool_config(self, name: str, config: Config) -> Path:
        path = self.path / f"{name}.toml"
        path.write_text(tomli_w.dumps(config_table(config)))
        return path

    def run(self, spec: ProcessSpec, config: Config) -> None:
        """To its end. Raises LaunchError with its last words, and when it has not ended within run.work_timeout."""
        deadline = time.monotonic() + config.run.work_timeout

        def watch() -> None:
            if time.monotonic() > deadline:
                self.keep = True
                raise LaunchError(
                    f"{spec.name} has not ended within run.work_timeout = {config.run.work_timeout:g} s; "
                    f"log: {self.path / spec.name}.log"
                )

        with Pools([spec], self.path, config.launch.grace) as pools:
            outcome = pools.supervise(watch)
        if outcome.interrupted:
            raise KeyboardInterrupt
        if message := outcome.message(config.launch.grace):
            self.keep = True
            raise LaunchError(message)


def doctor(config: Config, dtypes: Sequence[str], console: Console) -> Report:
    """Look at every engine, in the dtypes as configured or in each of `dtypes`. Raises AsyncRLError when the trainer's
    half fails: then there is nothing to compare with."""
    check_installed(["trainer"])
    check_task(config)
    check_model(config)
    named, rows, versions = config.model.path, list[Row](), dict[str, str]()
    with Workshop() as shop:
        config = with_model(config, shop)
        for each in [in_dtype(config, dtype) for dtype in dtypes] or [config]:
            trained, found = _compare(each, shop, console)
            rows += found
            versions |= trained.versions
    return Report(
        name=config.run.name,
        model=named or "made on the spot ([model.tiny])",
        task=", ".join(f"{key} = {value}" for key, value in config.task.items()),
        kind=config.trainer.kind,
        seed=config.run.seed,
        versions=versions,
        rows=tuple(rows),
    )


def in_dtype(config: Config, dtype: str) -> Config:
    """Trainer and engines alike. Raises ConfigError where that is not possible."""
    groups = tuple(msgspec.structs.replace(group, dtype=UNSET) for group in config.inference.group)
    changed = msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, dtype=dtype),
        inference=msgspec.structs.replace(config.inference, dtype="auto", group=groups),
    )
    check_config(changed)
    return changed


def _compare(config: Config, shop: Workshop, console: Console) -> tuple[Trained, list[Row]]:
    dtype = config.model.dtype
    folder = shop.path / dtype
    folder.mkdir()
    path = shop.write_pool_config(dtype, config)
    console.print(f"the trainer, {dtype} …", highlight=False)
    arguments = ("--config", str(path), "--folder", str(folder))
    shop.run(ProcessSpec(f"trainer-{dtype}", "trainer.parity", arguments, ends_run=True), config)
    trained = parity_files.read(folder / parity_files.TRAINED, Trained)
    groups = node_groups(config.inference)
    return trained, [_ask(group, config, path, folder, trained, shop, console) for group in groups]


def _ask(
    group: NodeGroup, config: Config, path: Path, folder: Path, trained: Trained, shop: Workshop, console: Console
) -> Row:
    """One group's engine; what keeps it from starting is a problem of its own, and the others are asked all the
    same."""
    inference, dtype = group.inference, config.model.dtype
    row = Row(
        group=group.name, engine=inference.engine, trainer_dtype=dtype,
        engine_dtype=dtype if inference.dtype == "auto" else inference.dtype,
    )  # fmt: skip
    console.print(f"engine {name_of(row)}, {row.engine_dtype} …", highlight=False)
    name = f"{group.name or 'engine'}-{dtype}"
    out = folder / f"{name}.json"
    own = ("--group", group.name) if group.name else ()
    arguments = ("--config", str(path), "--folder", str(folder), "--out", str(out), *own)
    elsewhere = interpreter(inference) if lives_elsewhere(inference) else ""
    try:
        check_mixture(config, [group])
        check_engines([group], config.task)
        shop.run(ProcessSpec(name, "inference.parity", arguments, ends_run=True, python=elsewhere), config)
        return judged(row, trained, parity_files.read(out, Served))
    except AsyncRLError as error:
        return msgspec.structs.replace(row, problems=(str(error),))


def write_files(report: Report, json: Path | None, markdown: Path | None) -> None:
    """Raises AsyncRLError when one cannot be written."""
    texts = [
        (json, msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"),
        (markdown, page(report)),
    ]
    for path, text in texts:
        if path is not None:
            try:
                path.write_text(text, encoding="utf-8")
            except OSError as error:
                raise AsyncRLError(f"{path} cannot be written: {error.strerror}") from error
