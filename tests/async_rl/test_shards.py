"""Where shards listen, and one account made of theirs."""

from __future__ import annotations

import msgspec
import pytest

from async_rl.config import load_config
from async_rl.run.directory import RunDirectory, RunDirectoryError
from async_rl.shards import whole_status
from async_rl.version import PolicyId
from async_rl.wire.messages import NodeStatus, Status
from async_rl.wire.security import shard_endpoint

POLICY = PolicyId("main", 3, "d3")
NODE = NodeStatus("a", "ready", "torch", 8, POLICY, 4, 0.5, 100, busy_s=5.0, alive_s=10.0)
STATUS = Status(
    uptime_s=1.0, nodes=(NODE,), trainer="t", newest=POLICY, confirmed_batches=3, steps=9,
    ledger={"issued": 10, "trained": 6}, eval_ledger={}, outside={"late": 1}, ready_groups=2, ready_bytes=5,
    reserved_bytes=7, waiting="nodes wait for tickets, and so for the trainer to draw batch 3", push_ms=(1.0,), bound=4,
    pushes=1,
)  # fmt: skip


def test_what_shards_count_is_added_up_and_a_nodes_newest_word_on_itself_counts():
    other = msgspec.structs.replace(
        STATUS, confirmed_batches=4, ledger={"issued": 5, "trained": 5}, outside={},
        waiting="the trainer waits for ticket 5",
        nodes=(msgspec.structs.replace(NODE, state="syncing", leased_samples=3, sampled_tokens=120, alive_s=11.0),),
        push_ms=(9.0,),
    )  # fmt: skip
    whole = whole_status([STATUS, other])
    assert whole.ledger == {"issued": 15, "trained": 11}
    assert (whole.confirmed_batches, whole.outside, whole.ready_groups) == (3, {"late": 1}, 4)
    assert whole.waiting == "the trainer waits for ticket 5"
    assert (whole.push_ms, whole.pushes) == ((1.0,), 1)
    (node,) = whole.nodes
    assert (node.state, node.leased_samples, node.sampled_tokens, node.alive_s) == ("ready", 7, 120, 11.0)
    assert whole_status([STATUS]) is STATUS


@pytest.mark.parametrize(
    ("endpoint", "second"),
    [
        ("auto", "auto"), ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"), ("tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001"),
        ("tcp://[::1]:7000", "tcp://[::1]:7001"), ("ipc:///tmp/x/buffer", "ipc:///tmp/x/buffer-1"),
    ],
)  # fmt: skip
def test_the_second_shard_listens_beside_the_first(endpoint, second):
    assert shard_endpoint(endpoint, 0) == endpoint
    assert shard_endpoint(endpoint, 1) == second


def test_a_run_directory_knows_where_every_shard_listens_and_keeps_their_journals_apart(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", load_config("quickstart", ["buffer.shards=2"]))
    try:
        assert [end.rpartition("/")[2] for end in directory.endpoints] == ["buffer", "buffer-1"]
        assert RunDirectory.open(tmp_path / "run").endpoints == directory.endpoints
        assert directory.shard_journal(0) == directory.journal != directory.shard_journal(1)
    finally:
        directory.remove_sockets()
    one = RunDirectory.create(tmp_path / "one", load_config("quickstart"))
    one.remove_sockets()
    assert one.endpoints == [one.endpoint]


def test_a_store_on_a_shards_port_is_refused(tmp_path):
    store = "buffer.store_endpoint=tcp://127.0.0.1:7001"
    overrides = ["buffer.shards=2", "buffer.endpoint=tcp://127.0.0.1:7000", store]
    with pytest.raises(RunDirectoryError, match=r"one of the 2 ports from tcp://127.0.0.1:7000 on"):
        RunDirectory.create(tmp_path / "run", load_config("quickstart", overrides))
