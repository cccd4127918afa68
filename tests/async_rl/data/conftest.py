"""Small files of every format, and a task made of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "question": f"question {n}",
            "answer": str(n),
            "level": n % 4,
            "note": None if n % 2 else "even",
            "chat": [{"role": "user", "content": f"question {n}"}],
        }
        for n in range(first, first + count)
    ]


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library makes of the files lies with the tests' own; nothing asks the network."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., Path]:
    """files("jsonl", 10): a file of ten rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def make(kind: str, count: int, name: str = "rows", first: int = 0) -> Path:
        path = tmp_path / f"{name}.{kind}"
        table = pa.Table.from_pylist(rows(count, first))
        match kind:
            case "jsonl":
                write_lines(path, rows(count, first))
            case "parquet":
                pq.write_table(table, path)
            case "arrow":
                with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                    writer.write_table(table)
            case "csv":
                path.write_text(
                    "question,answer\n" + "".join(f"question {n},{n}\n" for n in range(first, first + count))
                )
        return path

    return make
