"""Programs that nobody has read, run where they can do no harm (docs/sandbox.md): a model's own code, and tests of it.

Standard library alone, Linux alone. Where a machine cannot isolate programs nothing is run: `SandboxError` says what is
missing.
"""

from async_rl.sandbox.box import Sandbox, ToolResult, Verdict, run_python
from async_rl.sandbox.cell import SandboxError
from async_rl.sandbox.limits import DEFAULT, Limits

__all__ = ["DEFAULT", "Limits", "Sandbox", "SandboxError", "ToolResult", "Verdict", "run_python"]
