"""`report.html`: a run as one page that loads nothing from anywhere."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from async_rl.errors import AsyncRLError
from async_rl.run.directory import RunDirectory
from async_rl.run.display import duration
from async_rl.run.report import learning_plots, pool_plots
from async_rl.run.report.control_plots import control_plots
from async_rl.run.report.eval_section import is_worth_it, pass_plot, sets_html
from async_rl.run.report.headline import tiles, what_limited
from async_rl.run.report.page_parts import SCRIPT, STYLE
from async_rl.run.report.plot import Plot
from async_rl.run.report.run_data import RunData, read_run
from async_rl.run.report.tables import config_html, ledger_html
from async_rl.run.report.timeline import timeline
from async_rl.run.report.trajectories import Decoder, make_decoder, trajectories_html

STATES = {
    "finished": "finished",
    "running": "running: this is how far it has come",
    "stopped": "stopped before its end",
}


def write_report(directory: RunDirectory) -> Path:
    """Write the report of what is in a run's directory, at any time of its life, and return its path. Raises
    AsyncRLError when plotly is not installed, when a file of the run cannot be understood, and when the page cannot
    be written."""
    plotly_js = _plotly_js()
    run = read_run(directory)
    page = render(run, plotly_js, make_decoder(str(run.config["model"]["path"])), datetime.now())
    path = directory.report_path
    partial = path.with_name(f".{path.name}.part")
    try:
        partial.write_text(page, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise AsyncRLError(f"{path} cannot be written: {error.strerror}") from error
    return path


def render(run: RunData, plotly_js: str, decoder: Decoder, now: datetime) -> str:
    """The whole page. Everything that came from files is escaped."""
    line = timeline(run.steps, run.pools, run.seconds)
    learned = [learning_plots.reward_plot(run), learning_plots.length_plot(run), learning_plots.optimiser_plot(run)]
    held_out = [pass_plot(run)] if is_worth_it(run) else []
    aged = [learning_plots.staleness_plot(run), learning_plots.age_split_plot(run)]
    corrected = [learning_plots.ratio_plot(run), learning_plots.age_health_plot(run)]
    controlled = control_plots(run)
    pools = [pool_plots.idle_plot(line), pool_plots.rate_plot(line), pool_plots.work_plot(line)]
    spent = [pool_plots.step_plot(run), pool_plots.journey_plot(run), pool_plots.push_plot(run, line)]
    account = [pool_plots.buffer_plot(run, line)]
    body = f"""
{_section("Did it learn?", learned)}
{_section("How does it do on each set?", held_out, beside=sets_html(run)) if held_out else ""}
{_section("How old was the data?", aged)}
{_section("Was the correction healthy?", corrected)}
{_section("How far did a step go?", controlled) if controlled else ""}
{_section("Who waited for whom?", pools)}
{_section("Where did the time go?", spent)}
{_section("Where did every attempt go?", account, beside=ledger_html(run))}
<section><h2>What does the data look like?</h2>
<p class="words">The first trajectories of the first groups of some steps: chosen by their place, not by their reward.
The colour of a token is its age, in versions, when it was trained. Point at a token, or tap it, for its version and
log-probability.</p>
{trajectories_html(run, decoder)}</section>
<section><h2>Configuration</h2>
{config_html(run)}</section>"""
    sections = (learned, held_out, aged, corrected, controlled, pools, spent, account)
    drawn = [plot for plots in sections for plot in plots if plot.data]
    return _document(run, body, drawn, plotly_js, now)


def _document(run: RunData, body: str, plots: Sequence[Plot], plotly_js: str, now: datetime) -> str:
    name = html.escape(run.name)
    packed = base64.b64encode(gzip.compress(plotly_js.encode(), mtime=0)).decode()
    figures: list[dict[str, Any]] = [
        {"key": plot.key, "data": plot.data, "layout": {**plot.layout, "height": plot.height}} for plot in plots
    ]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy(SCRIPT, plotly_js)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="async-rl">
<title>{name}: async-rl report</title>
<style>{STYLE}</style>
</head>
<body>
{_header(run)}
<main>
<p id="trouble" class="empty" hidden></p>
<noscript><p class="empty">The plots need JavaScript; the figures and tables do not.</p></noscript>
{body}
</main>
<footer>Written by async-rl on {now:%Y-%m-%d at %H:%M} from {html.escape(str(run.path))}.
This page loads nothing.</footer>
<output id="token" hidden></output>
<script type="text/plain" id="plotly">{packed}</script>
<script type="application/json" id="plots">{_json(figures)}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _header(run: RunData) -> str:
    config = run.config
    algorithm = config["algorithm"]
    facts = [
        f"{len(run.steps):,} of {config['run']['steps']:,} steps in {duration(run.seconds)}",
        f"seed {config['run']['seed']}",
        f"staleness bound {run.bound}",
        f"batches of {config['buffer']['groups_per_step']} × {config['buffer']['group_size']}",
        f"{algorithm['surrogate']}, {algorithm['treatment']}, {algorithm['ratio_level']} ratios",
    ]
    cards = "".join(
        f'<div class="tile {tile.mark}"><span>{html.escape(tile.label)}</span><b>{html.escape(tile.value)}</b>'
        f"<span>{html.escape(tile.note)}</span></div>"
        for tile in tiles(run)
    )
    limit = what_limited(run)
    task = html.escape(str(config["task"].get("kind", "no task")))
    state = "not all of its steps" if run.state == "finished" and _is_short(run) else STATES[run.state]
    last = "" if run.state == "finished" else f'<p class="sub">{html.escape(_last_words(run))}</p>'
    return f"""<header>
<h1>{html.escape(run.name)}: {task} <span class="state {run.state}">{state}</span></h1>
<p class="sub">{html.escape(" · ".join(facts))}</p>
<div class="tiles">{cards}</div>
<p class="limit {limit.pool}"><b>{html.escape(limit.verdict)}:</b> {html.escape(limit.figures)}</p>
{last}</header>"""


def _last_words(run: RunData) -> str:
    """Of a run that has not finished."""
    seen = f"When last seen, {run.pools[-1]['pools']['waiting'] or 'nobody waited'}." if run.pools else ""
    why = f"Why it stopped stands in {run.path / 'logs'}." if run.state == "stopped" else ""
    return " ".join(words for words in (seen, why) if words)


def _is_short(run: RunData) -> bool:
    return len(run.steps) < int(run.config["run"]["steps"])


def _section(title: str, plots: Sequence[Plot], beside: str = "") -> str:
    """Plots in two columns, with something beside the last one."""
    cells = "".join(map(_figure, plots)) + (f'<div class="beside">{beside}</div>' if beside else "")
    return f'<section><h2>{title}</h2>\n<div class="plots">{cells}</div></section>'


def _figure(plot: Plot) -> str:
    """A place for the script to draw in, as high as the plot will be: the page does not jump."""
    wide = " wide" if plot.wide else ""
    inside = f'<div id="{plot.key}" style="height:{plot.height}px"></div>'
    if not plot.data:
        inside = '<p class="empty">Nothing was recorded for this.</p>'
    head = f'<h3>{html.escape(plot.title)}</h3><p class="words">{html.escape(plot.words)}</p>'
    return f'<figure class="plot{wide}"><figcaption>{head}</figcaption><div>{inside}</div></figure>\n'


def _policy(*scripts: str) -> str:
    """A content security policy: these scripts and no other, no network at all. Styles may be inline (plotly.js makes
    them), images may be data (it saves pictures so)."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def _json(figures: list[dict[str, Any]]) -> str:
    """JSON that cannot end the element it stands in."""
    return json.dumps(figures, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise AsyncRLError("plotly is not installed (pip install '.[report]' in the checkout)") from error
    return str(get_plotlyjs())
