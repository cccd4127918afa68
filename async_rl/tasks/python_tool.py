"""A Python interpreter as a tool: programs of the model's, in the sandbox (docs/sandbox.md)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from async_rl.sandbox import run_python


def python(code: Annotated[str, Meta(description="a whole program; what it prints is the result")]) -> str:
    """Run a Python program, without network or files, and see what it prints."""
    result = run_python(code)
    printed = result.stdout.rstrip("\n")
    if result.reason == "ok":
        return printed or "(nothing was printed)"
    last = result.stderr.strip().splitlines()[-1:]
    return "\n".join(part for part in (printed, f"error: {result.reason}", *last) if part)
