"""Fuzz the decoders with Atheris (coverage-guided, libFuzzer): `python -P tests/faults/fuzz_decoders.py --seconds 60`.

Ends with 0 when nothing was found; libFuzzer writes what crashed into the folder that it runs in."""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
with atheris.instrument_imports(include=["async_rl", "buffer", "decoders"]):
    import decoders
import hostile


def write_corpus(folder: Path) -> None:
    """Something to begin with: hostile messages, which are nearly good ones."""
    rng = random.Random(0)
    for number, (parts, said) in enumerate(
        zip(hostile.strangers("r", ["n"], folder / "no", rng), hostile.insiders(folder / "no", rng), strict=False)
    ):
        if number == 300:
            return
        (folder / f"frame-{number}").write_bytes(parts[0][:4096])
        body = b"".join(bytes(part) for part in hostile.as_payload(said).parts)
        (folder / f"body-{number}").write_bytes(body[:4096])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--seconds", type=int, default=60)
    seconds = parser.parse_args().seconds
    logging.disable()  # of what is refused
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder))
        atheris.Setup(
            [sys.argv[0], folder, f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=2048", "-max_len=4096"],
            decoders.decode_all,
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
