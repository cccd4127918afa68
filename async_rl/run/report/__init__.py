"""The report of a run: one page, from what is in its directory."""

from async_rl.run.report.page import write_report

__all__ = ["write_report"]
