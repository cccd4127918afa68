"""The report's stylesheet and script: they travel inside the page, which loads nothing."""

STYLE = """
:root { color-scheme: light; --ink: #1f2933; --muted: #5c6874; --line: #dfe4e9; --pale: #f5f7f9;
  --inference: #2f6fb3; --trainer: #d9791a; --bad: #c0392b; --good: #23875a; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink); line-height: 1.5; overflow-wrap: anywhere;
  font-family: -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Liberation Sans", sans-serif; }
main, body > header, body > footer { max-width: 1180px; margin: 0 auto; padding: 0 24px; }
body > header { padding-top: 28px; }
h1 { margin: 0; font-size: 1.75rem; line-height: 1.2; }
h2 { margin: 44px 0 0; padding-top: 20px; border-top: 1px solid var(--line); font-size: 1.3rem; }
h3 { margin: 0; font-size: 1rem; }
p { margin: 4px 0 8px; }
.sub, .words, .note, footer { color: var(--muted); font-size: .9rem; }
.state { display: inline-block; padding: 1px 10px; margin-left: 6px; border-radius: 99px; font-size: .85rem;
  font-weight: 600; vertical-align: middle; background: var(--pale); border: 1px solid var(--line); }
.state.finished { color: var(--good); } .state.running { color: var(--inference); }
.state.stopped { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(4, minmax(0, 1fr)); gap: 10px; margin: 20px 0 14px; }
.tile { padding: 10px 14px; background: var(--pale); border-radius: 8px; border-left: 4px solid var(--line); }
.tile.bad { border-left-color: var(--bad); } .tile.bad b { color: var(--bad); }
.tile.inference { border-left-color: var(--inference); } .tile.trainer { border-left-color: var(--trainer); }
.tile b { display: block; font-size: 1.2rem; font-variant-numeric: tabular-nums; line-height: 1.35; }
.tile span { display: block; color: var(--muted); font-size: .82rem; line-height: 1.35; }
.limit { padding: 12px 16px; border-radius: 8px; background: var(--pale); font-size: 1.05rem;
  border-left: 4px solid var(--line); }
.limit.inference { border-left-color: var(--inference); } .limit.trainer { border-left-color: var(--trainer); }
.plots { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 26px 32px; margin-top: 16px; }
/* Two rows of the grid each, so that neighbours begin at the same height whatever their words. */
.plot { min-width: 0; margin: 0; display: grid; grid-row: span 2; grid-template-rows: subgrid; row-gap: 0; }
.plot > div { min-width: 0; } .beside { grid-row: span 2; min-width: 0; } .plot.wide { grid-column: 1 / -1; }
.plot .words { min-height: 1.4em; }
.empty { color: var(--muted); padding: 24px; background: var(--pale); border-radius: 8px; text-align: center; }
.scroll { overflow-x: auto; margin: 10px 0; }
table { border-collapse: collapse; font-size: .88rem; min-width: 420px; overflow-wrap: normal; }
th, td { text-align: left; vertical-align: top; padding: 4px 18px 4px 0; border-bottom: 1px solid var(--line); }
th { color: var(--muted); font-weight: 600; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
summary { cursor: pointer; color: var(--muted); padding: 6px 0; }
.legend span, .given, .t { border-radius: 3px; }
.legend span { display: inline-block; padding: 1px 8px; margin: 0 6px 6px 0; font-size: .85rem; }
.articles { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px; align-items: start; }
article { border: 1px solid var(--line); border-radius: 8px; overflow: hidden; font-size: .9rem; }
article header { padding: 7px 12px; background: var(--pale); }
article header span { color: var(--muted); }
.tokens { margin: 0; padding: 10px 12px; max-height: 22em; overflow-y: auto; white-space: pre-wrap; line-height: 1.9;
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; }
.given { color: var(--muted); background: #eef1f4; padding: 2px 0; }
.t { padding: 2px 1px; margin-right: 1px; cursor: default; } .t.on { outline: 2px solid var(--ink); }
#token { position: fixed; left: 50%; bottom: 14px; transform: translateX(-50%); max-width: calc(100vw - 24px);
  width: max-content; padding: 6px 14px; border-radius: 8px; background: var(--ink); color: #fff; font-size: .88rem;
  pointer-events: none; }
body > footer { margin-top: 48px; padding-top: 14px; padding-bottom: 32px; }
@media (max-width: 720px) {
  main, body > header, body > footer { padding-left: 16px; padding-right: 16px; }
  h1 { font-size: 1.4rem; }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 8px; }
  .tile { padding: 8px 10px; } .tile b { font-size: 1.02rem; }
  .plots, .articles { grid-template-columns: minmax(0, 1fr); }
  .plots { gap: 28px; }
  table { min-width: 0; font-size: .82rem; } th, td { padding-right: 10px; } td { overflow-wrap: break-word; }
  td.number { white-space: nowrap; }
}
"""

# plotly.js comes compressed: the page is 2 MB instead of 5, and every browser since 2023 can undo it.
SCRIPT = """
(async () => {
  const root = document.documentElement;
  const narrow = window.matchMedia("(max-width: 720px)").matches;
  try {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    for (const plot of JSON.parse(document.getElementById("plots").textContent)) {
      if (narrow) {  // a finger that scrolls the page must not be caught by a plot
        plot.layout.dragmode = false;
        plot.layout.font.size = 11;
        for (const key of Object.keys(plot.layout)) {
          if (/^[xy]axis/.test(key)) plot.layout[key].fixedrange = true;
        }
      }
      await Plotly.newPlot(plot.key, plot.data, plot.layout, { displayModeBar: false, responsive: true });
    }
    root.dataset.plots = "drawn";
  } catch (error) {
    root.dataset.plots = "failed";
    const line = document.getElementById("trouble");
    line.textContent = "The plots could not be drawn: " + error + ". They need a browser of 2023 or newer.";
    line.hidden = false;
    console.error(error);
  }
})();
for (const kind of ["pointerover", "click"]) {
  document.addEventListener(kind, (event) => {
    const token = event.target.closest?.(".t");
    const words = document.getElementById("token");
    words.hidden = !token;
    words.textContent = token?.dataset.facts ?? "";
    document.querySelector(".t.on")?.classList.remove("on");
    token?.classList.add("on");
  });
}
"""
