"""What was learned and from what: reward, age of the data, health of its correction."""

from __future__ import annotations

from async_rl.run.curve import SMOOTHING, smooth
from async_rl.run.metrics import Record
from async_rl.run.report.eval_section import colours, error_bars
from async_rl.run.report.headline import are_rates, eval_interval
from async_rl.run.report.plot import (
    BOUND,
    BUFFER,
    INFERENCE,
    INK,
    MUTED,
    TEAL,
    Plot,
    Trace,
    age_colour,
    axis,
    chunks_of,
    has_values,
    layout,
    line,
    places,
    rounded,
    share_of,
    text,
    values,
    version_axis,
)
from async_rl.run.report.run_data import RunData

AGE_COLUMNS = 100  # of the stack of ages


def reward_plot(run: RunData) -> Plot:
    steps = [step for step in run.steps if step.get("reward") is not None]
    chunks = chunks_of(steps)
    x = places(chunks)
    # Smoothed before it is thinned, so that it is the same curve as the one in learning_curve.png.
    smoothed = smooth([float(step["reward"]) for step in steps])
    by_version = {int(step["version"]): value for step, value in zip(steps, rounded(smoothed), strict=True)}
    data: list[Trace] = []
    if steps:
        data = [
            line(x, values(chunks, "reward"), "sampled, each step", "#b4bec8", line={"width": 1}),
            line(x, [by_version[version] for version in x], f"sampled, mean of {SMOOTHING}", INK, line={"width": 2.5}),
        ]
    rates = are_rates(run)
    shown = colours(run)
    for name, colour in shown.items():
        label = "evaluation" if len(shown) == 1 else f"evaluation: {name}"
        data.append(_eval_trace(run.eval_sets[name], rates, text(label), colour))
    words = "Sampled reward is what training saw, at sampling temperature."
    if run.evals:
        words += " Evaluation is on instances held out"
        words += "" if run.config["run"]["eval"] else f", at temperature {run.config['run']['eval_temperature']:g}"
        words += ", with 95 % intervals." if _have_intervals(run, rates) else "; no intervals: rewards are no rates."
    y = axis("reward", **({"rangemode": "tozero"} if rates else {}))
    return Plot("reward", "Reward", words, data, layout(xaxis=version_axis(), yaxis=y), 380, wide=True)


def _have_intervals(run: RunData, rates: bool) -> bool:
    return all(eval_interval(item, rates) for items in run.eval_sets.values() for item in items)


def _eval_trace(evals: list[Record], rates: bool, name: str, colour: str) -> Trace:
    rewards = [float(item["reward"]) for item in evals]
    intervals = [eval_interval(item, rates) for item in evals]
    notes = [f"n = {item.get('n', '–')}" for item in evals]
    trace = line([int(item["version"]) for item in evals], rounded(rewards), name, colour)
    trace |= {"mode": "lines+markers", "marker": {"size": 9, "color": colour}, "cliponaxis": False, "text": notes,
              "hovertemplate": "%{y:.3f} (%{text})"}  # fmt: skip
    return trace | error_bars(rewards, intervals, colour)


def length_plot(run: RunData) -> Plot:
    """`length_quantiles` are evenly spaced from the shortest to the longest answer."""

    def quantile(share: float) -> list[float | None]:
        def of(step: Record) -> float | None:
            found = step.get("length_quantiles")
            return float(found[round(share * (len(found) - 1))]) if found else None

        return values(chunks, of)

    chunks = chunks_of(run.steps)
    x = places(chunks)
    low, middle, high, longest = quantile(0.1), quantile(0.5), quantile(0.9), quantile(1.0)
    data = []
    if has_values(middle):
        data = [
            line(x, high, "10 to 90 %", MUTED, line={"width": 0}, showlegend=False, hoverinfo="skip"),
            line(x, low, "10 to 90 %", "rgba(102,114,127,0.5)", line={"width": 0}, fill="tonexty",
                 fillcolor="rgba(102,114,127,0.22)"),
            line(x, middle, "median", INK),
            line(x, longest, "longest", BOUND, line={"width": 1, "dash": "dot"}),
        ]  # fmt: skip
    limit = run.config["inference"]["max_new_tokens"]
    words = (
        f"Sampled tokens of the answers that were trained; an answer may have {limit}. A median that creeps to the "
        "limit means that answers are cut."
    )
    return Plot("length", "Length of answers", words, data,
                layout(xaxis=version_axis(), yaxis=axis("tokens", rangemode="tozero")), 400)  # fmt: skip


def optimiser_plot(run: RunData) -> Plot:
    chunks = chunks_of(run.steps)
    x = places(chunks)
    key = "update_ratio" if any("update_ratio" in step for step in run.steps) else "learning_rate"
    name = key.replace("_", " ")
    norm, entropy, rate = (values(chunks, each) for each in ("grad_norm", "entropy_proxy", key))
    data = []
    if has_values(norm, entropy):
        data = [
            line(x, norm, "gradient norm", INK),
            line(x, entropy, "entropy", TEAL, yaxis="y2"),
            line(x, rate, name, MUTED, yaxis="y3", line={"dash": "dot"}),
        ]
    words = (
        "Gradient norm before clipping; entropy, as the mean −log π of the sampled tokens (it falls as the policy "
        f"grows certain); and the {name}."
    )
    panels = _panels(("norm", "entropy", "rate"))
    return Plot("optimiser", "Optimiser", words, data, layout(**panels), 400)


def _rate_of(step: Record) -> float | None:
    """How far the optimiser was to go: of a sketch, as a part of the weights' norm."""
    rate: float | None = step.get("learning_rate", step.get("update_ratio"))
    return rate


def staleness_plot(run: RunData) -> Plot:
    """Above, the oldest and the mean token against the bound; below, all of them by age."""
    chunks = chunks_of(run.steps)
    x = places(chunks)
    data: list[Trace] = []
    if run.steps:
        data = [
            line(x, values(chunks, "staleness_max", max), "oldest", INK, line={"shape": "hvh"}),
            line(x, values(chunks, "staleness_mean"), "mean", MUTED, line={"dash": "dot"}),
            line([0, x[-1]], [run.bound, run.bound], f"bound ({run.bound})", BOUND, line={"dash": "dash"}, mode="lines",
                 hoverinfo="skip"),
            *_adaptive_bound(run),
            *_age_stack(run),
        ]  # fmt: skip
    words = (
        f"How many versions the policy had moved on from the one that sampled a token when that token was trained. "
        f"No token may be older than the bound of {run.bound}."
    )
    shape = layout(
        bargap=0,
        xaxis=version_axis(anchor="y2"),
        yaxis=axis("age (versions)", domain=[0.68, 1], range=[-0.15, max(run.bound, 1) * 1.2], dtick=_whole(run.bound)),
        yaxis2=axis("share of tokens", domain=[0, 0.56], range=[0, 1], tickformat=".0%"),
    )
    return Plot("staleness", "Age of the tokens that were trained", words, data, shape, 420)


def _adaptive_bound(run: RunData) -> list[Trace]:
    """With buffer.adaptive: the bound that nodes worked by, over the batches confirmed."""
    seen = {look["pools"]["confirmed"]: look["pools"].get("adaptive_bound") for look in run.pools}
    if not any(bound is not None for bound in seen.values()):
        return []
    return [line(list(seen), list(seen.values()), "adaptive bound", BOUND, line={"shape": "hv"})]


def _age_stack(run: RunData) -> list[Trace]:
    chunks = chunks_of([step for step in run.steps if step.get("staleness_tokens")], AGE_COLUMNS)
    counts = [_summed([step["staleness_tokens"] for step in chunk]) for chunk in chunks]
    oldest = max((len(count) for count in counts), default=0)
    traces = []
    for age in range(oldest):
        shares = [count[age] / max(1, sum(count)) if age < len(count) else 0.0 for count in counts]
        if any(shares):
            traces.append(
                {"type": "bar", "x": places(chunks), "y": rounded(shares), "yaxis": "y2", "name": f"age {age}",
                 "marker": {"color": age_colour(age, run.bound), "line": {"width": 0}},
                 "hovertemplate": "%{y:.1%}"}
            )  # fmt: skip
    return traces


def age_split_plot(run: RunData) -> Plot:
    chunks = chunks_of(run.steps)
    flight, queue = (
        values(chunks, lambda step, key=key: _mean_age(step.get(key)))  # type: ignore[misc]
        for key in ("in_flight_ages", "in_queue_ages")
    )
    x = places(chunks)
    data = []
    if has_values(flight, queue):
        data = [
            share_of(x, flight, "in flight", INFERENCE, "age", hovertemplate="%{y:.2f}"),
            share_of(x, queue, "in the queue", BUFFER, "age", hovertemplate="%{y:.2f}"),
        ]
    words = (
        "Versions that passed while an attempt was sampled (in flight) and while it lay in the buffer (in the queue); "
        "mean over attempts at the draw. Age in flight falls with shorter answers or faster nodes, age in the queue "
        "with fewer nodes or a lower bound."
    )
    return Plot("age_split", "Where the age came from", words, data,
                layout(xaxis=version_axis(), yaxis=axis("versions", rangemode="tozero", nticks=6)), 420)  # fmt: skip


def ratio_plot(run: RunData) -> Plot:
    chunks = chunks_of(run.steps)
    x = places(chunks)
    ess, k3 = values(chunks, "ess"), values(chunks, "k3")
    clipped = values(chunks, lambda step: None if step.get("kept_fraction") is None else 1 - step["kept_fraction"])
    data = []
    if has_values(ess, k3, clipped):
        data = [
            line(x, ess, "effective sample size", INK),
            line(x, k3, "k3", TEAL, yaxis="y2"),
            line(x, clipped, "outside the bounds", BOUND, yaxis="y3"),
        ]
    words = (
        "Ratios of the trainer's probability of each token to that of the policy that sampled it. Effective sample "
        "size: the share of the tokens that still count after weighting (1 is all). k3 estimates the divergence "
        "between the two policies. Outside: the share whose ratio was clipped, truncated or masked."
    )
    panels = _panels(("sample size", "k3", "outside"))
    for key in ("yaxis", "yaxis3"):
        panels[key]["tickformat"] = ".1%"
    return Plot("ratios", "Health of the importance ratios", words, data, layout(**panels), 400, wide=True)


def age_health_plot(run: RunData) -> Plot:
    k3, kept = (_by_age(run.steps, name) for name in ("age_k3", "age_kept"))
    ages = sorted(k3)
    data: list[Trace] = []
    if ages:
        colours = {"color": [age_colour(age, run.bound) for age in ages]}
        outside = [1 - kept.get(age, 1.0) for age in ages]
        data = [
            {"type": "bar", "x": ages, "y": rounded([k3[age] for age in ages]), "name": "k3", "marker": colours},
            {"type": "bar", "x": ages, "y": rounded(outside), "name": "outside", "marker": colours, "yaxis": "y2"},
        ]
    words = (
        "The same by the age at which tokens were trained, over the whole run: how far the policy had moved from the "
        "one that sampled them, and which share the correction held back. Where the second nears 1, data of that age "
        "is sampled for nothing: lower buffer.max_staleness."
    )
    shape = layout(
        xaxis=axis("age (versions)", dtick=_whole(run.bound), anchor="y2"),
        yaxis=axis("k3", domain=[0.56, 1.0], rangemode="tozero", nticks=4),
        yaxis2=axis("outside", domain=[0.0, 0.44], rangemode="tozero", nticks=4, tickformat=".1%"),
        showlegend=False,
    )
    return Plot("age_health", "Health of the ratios by age", words, data, shape, 360)


def _by_age(steps: list[Record], name: str) -> dict[int, float]:
    """Mean over all trained tokens of each age, from the steps' means under "name/AGE"."""
    total: dict[int, float] = {}
    weight: dict[int, float] = {}
    for step in steps:
        for age, tokens in enumerate(step.get("staleness_tokens") or ()):
            if tokens and (value := step.get(f"{name}/{age}")) is not None:
                total[age] = total.get(age, 0.0) + tokens * value
                weight[age] = weight.get(age, 0.0) + tokens
    return {age: total[age] / weight[age] for age in total}


def _panels(titles: tuple[str, str, str]) -> dict[str, dict[str, object]]:
    """Three y axes above each other over one x axis."""
    domains = ([0.72, 1.0], [0.36, 0.64], [0.0, 0.28])
    names = ("yaxis", "yaxis2", "yaxis3")
    found = {
        name: axis(title, domain=domain, nticks=4)
        for name, title, domain in zip(names, titles, domains, strict=True)
    }  # fmt: skip
    return {"xaxis": version_axis(anchor="y3"), **found}


def _summed(counts: list[list[int]]) -> list[int]:
    longest = max(len(count) for count in counts)
    return [sum(count[age] for count in counts if age < len(count)) for age in range(longest)]


def _mean_age(counts: list[int] | None) -> float | None:
    """Of attempts counted by age."""
    if not counts or not sum(counts):
        return None
    return sum(age * count for age, count in enumerate(counts)) / sum(counts)


def _whole(bound: int) -> int:
    """A distance between ticks that makes at most five."""
    return max(1, -(-bound // 4))
