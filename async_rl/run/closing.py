"""What a run says at its end: what it made, how it went, what to try next."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_rl.run.directory import RunDirectory
from async_rl.run.display import duration
from async_rl.run.parity import parity_text


def closing_words(directory: RunDirectory, summary: Mapping[str, Any]) -> str:
    """The end of `async-rl run`, from the summary."""
    path = directory.path
    made = [
        ("summary", directory.summary_path),
        ("report", directory.report_path),
        ("learning curve", directory.curve_path),
        ("metrics", directory.metrics_path),
        ("model" if _is_whole(directory) else "adapter (PEFT)", directory.adapters / "final"),
        ("best version", directory.adapters / "best"),
    ]
    return "\n".join(
        [
            "",
            summary_text(summary),
            "",
            "made:",
            *(f"  {label:<16}{place}" for label, place in made if place.exists()),
            *_loading(directory),
            "",
            "try next:",
            *(
                []
                if _is_whole(directory)
                else [f"  async-rl export {path} DIR --merged  # the trained policy as a whole model"]
            ),
            f"  async-rl run {path}/config.toml --set buffer.max_staleness=0  # the same, in lock-step",
            f"  async-rl run {path}/config.toml --set algorithm.preset=uncorrected  # without correcting for age",
        ]
    )


def _loading(directory: RunDirectory) -> list[str]:
    """The line of Python that loads the adapter or the model, if there is one."""
    folder = directory.adapters / "final"
    if _is_whole(directory):
        return ["", "load the model in Python:", f"  {whole_line(folder)}"]
    try:
        base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError):
        return []
    model = f"transformers.AutoModelForCausalLM.from_pretrained({str(base)!r})"
    return ["", "load the adapter in Python:", f"  model = peft.PeftModel.from_pretrained({model}, {str(folder)!r})"]


def _is_whole(directory: RunDirectory) -> bool:
    """Whether what was trained is a whole model, not an adapter."""
    return (directory.adapters / "final" / "config.json").is_file()


def whole_line(folder: Path) -> str:
    """The line of Python that loads a whole model."""
    return f"model = transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})"


def summary_text(summary: Mapping[str, Any]) -> str:
    """A run in a few lines."""
    rates, idle, push = summary["tokens_per_second"], summary["idle_fraction"], summary["push_ms"]
    staleness, ledger = summary["staleness"], summary["ledger"]
    lines = [
        ("steps", f"{summary['steps']} in {duration(summary['wall_seconds'])}"),
        ("reward", f"{_number(summary['reward']['first'])} → {_number(summary['reward']['last'])} (sampled)"),
        *_eval_lines(summary),
        ("staleness", f"max {staleness['max']}, mean {staleness['mean']:.2f}, bound {staleness['bound']}"),
        ("tokens/s", f"rollout {_number(rates['rollout'], ',.0f')}, train {_number(rates['train'], ',.0f')}"),
        ("idle", f"inference {_number(idle['inference'], '.0%')}, trainer {_number(idle['trainer'], '.0%')}"),
        ("push", f"p50 {_number(push['p50'], '.0f')} ms, p99 {_number(push['p99'], '.0f')} ms{_push_bytes(summary)}"),
    ]
    if words := parity_text(summary.get("parity")):
        lines.append(("parity", f"{words}: largest |Δ log p| from the trainer"))
    if ledger:
        balance = "balances" if summary.get("ledger_balances") else "DOES NOT BALANCE"
        dropped = sum(ledger["dropped"].values())
        lines.append(
            ("ledger", f"{balance}: {ledger['issued']:,} issued, {ledger['trained']:,} trained, {dropped:,} dropped")
        )
    return "\n".join(f"{label:<10}{text}" for label, text in lines)


def _eval_lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """One for each set, by name where there are several, and which version was the best."""
    sets = summary["eval"].get("sets", {})
    if len(sets) < 2:
        lines = [("eval", f"{_number(summary['eval']['first'])} → {_number(summary['eval']['last'])}")]
    else:
        lines = [
            ("eval", f"{_number(each['first'])} → {_number(each['last'])} on {name}") for name, each in sets.items()
        ]
    best = summary.get("best")
    return lines + ([("best", f"version {best['version']}, {best['reward']:.3f} on {best['set']}")] if best else [])


def resume_words(directory: RunDirectory) -> str:
    """The end of an interrupted run."""
    path = directory.path
    if directory.has_checkpoint():
        return f"interrupted; to go on:  async-rl run {path / 'config.toml'} --out {path} --resume"
    return f"interrupted before the first checkpoint; logs: {directory.logs}"


def _push_bytes(summary: Mapping[str, Any]) -> str:
    """How much a version is, and what it would be in other forms."""
    size, full, adapter = (summary.get(f"push_bytes{form}") for form in ("", "_full", "_adapter"))
    if not (size and full and adapter):
        return ""
    return f"; {size:,} bytes (whole weights {full:,}, an adapter {adapter:,})"


def _number(value: float | None, form: str = ".3f") -> str:
    return "–" if value is None else format(value, form)
