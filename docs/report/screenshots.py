"""The pictures of a run's report in this folder, made again:

    python docs/report/screenshots.py RUN_DIRECTORY

writes the report of that run, opens it in headless Chromium, and saves its first screen and the whole page at the
width of a desk and of a phone. Run it with the project installed (`make setup`: .venv/bin/python).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from async_rl.errors import AsyncRLError
from async_rl.run.directory import RunDirectory
from async_rl.run.report import write_report

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "support"))

from browser import Browser, find_chromium  # noqa: E402

SHOTS = (("first-screen.webp", 1280, False), ("desktop.webp", 1280, True), ("phone.webp", 390, True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the pictures of a run's report again.")
    parser.add_argument("directory", type=Path, metavar="RUN_DIRECTORY")
    chromium = find_chromium()
    if chromium is None:
        sys.exit("no Chromium on this machine: install the package `chromium`")
    try:
        report = write_report(RunDirectory.open(parser.parse_args().directory))
    except AsyncRLError as error:
        sys.exit(str(error))
    with Browser(chromium) as browser:
        for name, width, whole in SHOTS:
            browser.open(report, width)
            if complaints := browser.complaints():
                sys.exit(f"{report} at {width} pixels: {complaints}")
            browser.screenshot(HERE / name, whole)
            print(HERE / name)


if __name__ == "__main__":
    main()
