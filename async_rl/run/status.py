"""`async-rl status`: how a run is, from its buffer while it runs, else from what it left.

A running buffer tells whoever has the run's id and token (`ask`). Of a run that is over, its directory tells: the
last records of metrics.jsonl, the summary, the newest checkpoint, and the last words of processes that failed.
"""

from __future__ import annotations

import json
import os
import socket
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from async_rl.errors import AsyncRLError
from async_rl.run.directory import RunDirectory
from async_rl.run.launch import LAST_LINE_BYTES
from async_rl.run.metrics import Record, read_metrics, steps_of
from async_rl.run.summary import ledger_balances, nested_ledger, percentile
from async_rl.run.view import STATUS_TIMEOUT, Address, fetch_whole_status
from async_rl.wire.link import LinkRefused, LinkTimeout
from async_rl.wire.messages import NodeStatus, Status, StatusRequest, StoreStatus
from async_rl.wire.security import check_endpoint, read_token

Phase = Literal["running", "starting or ending", "finished", "failed", "stopped"]
"""stopped: over before its last step, and no process said that it failed: interrupted, killed, or never started."""


STORE_TIMEOUT = 1.0  # what it adds is not worth a longer wait
ERROR = "error: "  # how the last line of a process that failed begins (async_rl.run.process)


class StatusError(AsyncRLError):
    """There is nothing to show; the message says whom or what was asked."""


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """`behind` in versions; `busy` is the share of its time with work, `tokens_per_second` what it sampled over its
    time, both since it joined. `mismatch` is the largest difference of a log-probability from the trainer's when it
    last showed a policy, in nats, `canary` and `first` those under its canary and the first policy after that, `bound`
    what they have to be within; `reason` why it is quarantined; `limit` how many requests its engine would have in
    flight by now, of its slots."""

    name: str
    state: str
    engine: str | None
    policy: str | None
    behind: int | None
    leased: int
    slots: int
    busy: float
    tokens_per_second: float
    mismatch: float | None = None
    reason: str = ""
    bound: float | None = None
    canary: float | None = None
    first: float | None = None
    first_version: int | None = None
    limit: int | None = None


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """What `async-rl status --json` prints. None is what is not known. Of a run that is over, everything but the phase
    is as it was last recorded, `recorded_s` seconds ago."""

    phase: Phase
    run: str
    directory: str | None = None
    endpoint: str = ""
    uptime_s: float | None = None
    recorded_s: float | None = None
    steps: int
    confirmed: int
    reward: float | None = None
    trainer: str | None = None
    newest: str | None = None
    store: str | None = None
    nodes: list[NodeState] = []
    ready: dict[str, int] = {}
    ledger: dict[str, Any] | None = None
    ledger_balances: bool | None = None
    reused: dict[str, int] = {}
    eval_ledger: dict[str, int] = {}
    outside: dict[str, int] = {}
    staleness: dict[str, float | None] = {}
    push_ms: dict[str, float | None] = {}
    waiting: str = ""
    checkpoint: int | None = None
    last_words: list[str] = []
    go_on: str | None = None
    summary: dict[str, Any] | None = None


# --- where to ask ----------------------------------------------------------------------------------------------------


def state_of(place: str, token_file: Path | None = None, run: str | None = None, keys: Path | None = None) -> RunState:
    """`place` is a run directory, or the endpoint of a buffer. Raises AsyncRLError."""
    if "://" in place:
        return of_endpoint(place, token_file, run, keys)
    _check_no_endpoint_options(place, token_file, run, keys)
    return of_directory(RunDirectory.open(Path(place)))


def _check_no_endpoint_options(place: str, *options: object) -> None:
    if any(option is not None for option in options):
        raise StatusError(f"--token, --run and --keys go with an ENDPOINT (tcp://…, ipc://…), not a directory: {place}")


def address_of(place: str, token_file: Path | None, run: str | None, keys: Path | None) -> Address:
    """Of a run directory, or of an endpoint with what goes with it; `run` is by default that of the run.json beside
    the token. Raises AsyncRLError, also when nobody listens there."""
    if "://" not in place:
        _check_no_endpoint_options(place, token_file, run, keys)
        directory = RunDirectory.open(Path(place))
        address = Address.of(directory)
    else:
        check_endpoint(place, encrypted=keys is not None)
        if token_file is None:
            raise StatusError(f"{place}: add --token FILE, the file `token` of the run's directory or a copy of it")
        token = read_token(token_file)
        address = Address(place, run if run is not None else _run_beside(token_file), token, keys)
    if not listens(address.endpoint):
        raise StatusError(f"nobody listens at {address.endpoint}: is the buffer running, and is this where it listens?")
    return address


def of_endpoint(endpoint: str, token_file: Path | None, run: str | None, keys: Path | None = None) -> RunState:
    """See `address_of`. Raises AsyncRLError."""
    address = address_of(endpoint, token_file, run, keys)
    try:
        status = ask(address)
    except LinkRefused as refused:
        raise StatusError(f"{refused} (the token is from {token_file}, the run is {address.run})") from refused
    return live_state(status, address.run, endpoint)


def of_directory(directory: RunDirectory) -> RunState:
    """Raises AsyncRLError when a buffer listens and does not answer, and for a directory whose files are broken."""
    address = Address.of(directory)
    if listens(address.endpoint):
        try:
            status = ask(address)
        except LinkRefused:
            if directory.is_held():
                raise
        else:
            return live_state(status, directory.run_id, address.endpoint, directory)
    return state_at_rest(directory, held=directory.is_held())


def ask(address: Address) -> Status:
    """A buffer's own account, of all its shards as far as they are known: an endpoint is that of one. Raises
    LinkRefused (wrong run, wrong token, wrong role of a key), LinkTimeout, KeyFileError."""
    clients = address.clients(f"status-{os.getpid()}")
    try:
        for client in clients:
            client.connect(STATUS_TIMEOUT)
        return fetch_whole_status(clients, STATUS_TIMEOUT)
    except LinkTimeout as late:
        raise LinkTimeout(f"{late} (a policy store answers nobody: the buffer's endpoint is needed)") from late
    finally:
        for client in clients:
            client.close(0.2)


def listens(endpoint: str) -> bool:
    """Whether anybody does."""
    scheme, _, address = endpoint.partition("://")
    try:
        if scheme == "ipc":
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(STATUS_TIMEOUT)
                probe.connect(address)
        else:
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), STATUS_TIMEOUT).close()
    except (OSError, ValueError):
        return False
    return True


def _run_beside(token_file: Path) -> str:
    beside = token_file.with_name("run.json")
    try:
        return str(json.loads(beside.read_text())["run"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StatusError(f"{beside} does not name the run ({error!r}): name it with --run ID") from error


# --- a run that is going on ------------------------------------------------------------------------------------------


def live_state(status: Status, run: str, endpoint: str, directory: RunDirectory | None = None) -> RunState:
    """What the buffer says; with the directory also what the trainer has recorded and whether the store is there."""
    records = read_metrics(directory.metrics_path) if directory else []
    newest = status.newest.version if status.newest else None
    ledger = nested_ledger(status.ledger)
    return RunState(
        phase="running",
        run=run,
        directory=str(directory.path) if directory else None,
        endpoint=endpoint,
        uptime_s=status.uptime_s,
        steps=status.steps,
        confirmed=status.confirmed_batches,
        trainer=status.trainer,
        newest=status.newest.short() if status.newest else None,
        store=_store_state(directory) if directory else None,
        nodes=[_live_node(node, newest) for node in status.nodes],
        ready={"groups": status.ready_groups, "bytes": status.ready_bytes, "reserved_bytes": status.reserved_bytes},
        ledger=ledger,
        ledger_balances=ledger_balances(ledger),
        reused=status.reused,
        eval_ledger=status.eval_ledger,
        outside=status.outside,
        push_ms=_pushes(status.push_ms, status.pushes),
        waiting=status.waiting,
        **_last_step(records, status.bound, status.adaptive_bound),
    )


def _store_state(directory: RunDirectory) -> str:
    address = Address.of_store(directory)
    if not listens(address.endpoint):
        return "does not listen"
    try:
        return store_text(ask_store(address))
    except AsyncRLError:
        return "listens"


def ask_store(address: Address) -> StoreStatus:
    """The policy store's own account. Raises LinkRefused, LinkTimeout, KeyFileError."""
    client = address.client(f"status-{os.getpid()}", "the store")
    try:
        client.connect(STORE_TIMEOUT)
        client.send(StatusRequest())
        while True:
            message = client.receive(STORE_TIMEOUT, "the store's status").message
            if isinstance(message, StoreStatus):
                return message
    finally:
        client.close(0.2)


def store_text(status: StoreStatus) -> str:
    """What it and the nodes that relay have sent, and who of these was bypassed."""
    if not status.relays and not status.bypasses:
        return "listens"
    bypassed = ", ".join(f"{count} × {why}" for why, count in sorted(status.bypasses.items()))
    words = [
        f"listens; has sent {status.served_bytes / 1e6:,.1f} MB",
        f"{len(status.relays)} relays {status.relayed_bytes / 1e6:,.1f} MB",
        f"bypassed: {bypassed}" if bypassed else "",
        f"sent wrong bytes, and are not used: {', '.join(status.liars)}" if status.liars else "",
    ]
    return "; ".join(filter(None, words))


def _live_node(node: NodeStatus, newest: int | None) -> NodeState:
    return NodeState(
        name=node.name,
        state=node.state,
        engine=node.engine,
        policy=node.policy.short() if node.policy else None,
        behind=newest - node.policy.version if node.policy and newest is not None else None,
        leased=node.leased_samples,
        slots=node.slots,
        limit=node.limit or None,
        busy=node.busy_fraction,
        tokens_per_second=node.sampled_tokens / node.alive_s if node.alive_s else 0.0,
        mismatch=node.max_dlogp,
        reason=node.reason,
        bound=node.bound,
        canary=node.canary.max_dlogp if node.canary else None,
        first=node.first.max_dlogp if node.first else None,
        first_version=node.first.version if node.first else None,
    )


def _last_step(records: Sequence[Record], bound: int | None, adaptive: int | None = None) -> dict[str, Any]:
    steps = steps_of(records)
    last = steps[-1] if steps else {}
    return {
        "reward": last.get("reward"),
        "staleness": {
            "max": last.get("staleness_max"),
            "mean": last.get("staleness_mean"),
            "bound": bound,
            "adaptive_bound": adaptive,
        },
    }


def _pushes(push_ms: Sequence[float], count: int) -> dict[str, float | None]:
    return {"p50": percentile(push_ms, 50), "p99": percentile(push_ms, 99), "count": count}


# --- a run that is over ----------------------------------------------------------------------------------------------


def state_at_rest(directory: RunDirectory, held: bool) -> RunState:
    """From what lies in the directory; `held` when a process of this machine still has it. Raises AsyncRLError."""
    records = read_metrics(directory.metrics_path)
    steps = steps_of(records)
    confirmed = int(steps[-1]["version"]) if steps else 0
    planned, bound = _planned(directory)
    summary = _summary(directory)
    pools: Record = next((record["pools"] for record in reversed(records) if "pools" in record), {})
    pushes = [push for record in records if "pools" in record for push in record["pools"]["push_ms"]]
    ledger = nested_ledger(pools["ledger"]) if pools else None
    done = summary is not None and confirmed >= planned
    words = [] if done or held else failures(directory.logs)
    phase: Phase = "starting or ending" if held else "finished" if done else "failed" if words else "stopped"
    over = phase in ("failed", "stopped")
    return RunState(
        phase=phase,
        run=directory.run_id,
        directory=str(directory.path),
        endpoint=directory.endpoint,
        uptime_s=pools.get("uptime_s"),
        recorded_s=max(0.0, time.time() - directory.metrics_path.stat().st_mtime) if records else None,
        steps=planned,
        confirmed=confirmed,
        nodes=[_recorded_node(node, confirmed) for node in pools.get("nodes", ())],
        ready={key: pools[f"ready_{key}"] for key in ("groups", "bytes")} if pools else {},
        ledger=ledger,
        ledger_balances=ledger_balances(ledger) if ledger else None,
        reused=pools.get("reused", {}),
        push_ms=_pushes(pushes, len(pushes)),
        waiting=str(pools.get("waiting", "")),
        checkpoint=newest_checkpoint(directory.checkpoints),
        last_words=words,
        go_on=f"async-rl run {directory.config_path} --out {directory.path} --resume" if over else None,
        summary=summary if done else None,
        **_last_step(records, bound),
    )


def failures(logs: Path) -> list[str]:
    """What each process that ended with an error said last, after its name."""
    last = {log.stem: _last_line(log) for log in sorted(logs.glob("*.log"))}
    return [f"{name}: {line.removeprefix(ERROR)}" for name, line in last.items() if line.startswith(ERROR)]


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LAST_LINE_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "")


def newest_checkpoint(checkpoints: Path) -> int | None:
    """Its version: a checkpoint is a folder v<version> that exists when it is whole."""
    versions = [folder.name[1:] for folder in checkpoints.glob("v*") if folder.is_dir()]
    return max((int(version) for version in versions if version.isdecimal()), default=None)


def _recorded_node(node: Mapping[str, Any], newest: int) -> NodeState:
    version, alive = node["version"], float(node["alive_s"])
    return NodeState(
        name=node["name"],
        state=node["state"],
        engine=node.get("engine"),
        policy=None if version is None else str(version),
        behind=None if version is None else newest - int(version),
        leased=node["leased"],
        slots=node["slots"],
        limit=node.get("limit"),
        busy=float(node["busy_s"]) / alive if alive else 0.0,
        tokens_per_second=float(node["sampled_tokens"]) / alive if alive else 0.0,
        mismatch=node.get("max_dlogp"),
        reason=node.get("reason", ""),
        **{key: node.get(key) for key in ("bound", "canary", "first", "first_version")},
    )


def _planned(directory: RunDirectory) -> tuple[int, int | None]:
    """Steps and bound as configured; read without checking the rest, which another version may have written."""
    try:
        table = tomllib.loads(directory.config_path.read_text())
        return int(table["run"]["steps"]), int(table["buffer"]["max_staleness"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StatusError(f"{directory.config_path} is broken: {error!r}") from error


def _summary(directory: RunDirectory) -> dict[str, Any] | None:
    try:
        summary = json.loads(directory.summary_path.read_text())
        return {**summary}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise StatusError(f"{directory.summary_path} is broken: {error!r}") from error
