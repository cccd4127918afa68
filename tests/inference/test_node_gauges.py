"""What a node tells Prometheus, from a real engine at work, through a real scrape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scraping import scrape, targets

from async_rl.run.exporter import Exporter
from inference.gauges import NodeGauges


class End:
    bytes_sent, bytes_received = 10, 20


def test_a_nodes_numbers_are_those_of_its_engine_and_its_loop(qwen: Any, tmp_path: Path) -> None:
    engine = qwen.engine(versions=(0, 1))
    engine.flip(qwen.policy(1)[0], "finish")
    for sample in range(3):
        engine.submit(qwen.request(sample, new=20))
    engine.step()
    exporter, gauges = Exporter(), NodeGauges(4, {"buffer": End(), "store": End()})
    gauges.flipped(0.3)
    gauges.flipped(1.5)
    gauges.failed()
    with exporter.serve(tmp_path, "node-0", {}):
        exporter.publish(gauges.reading(engine, tokens=70, steps=9, busy_s=1.25, scoring=2))
        samples = scrape(targets(tmp_path)["node-0"]["address"])
    assert samples["async_rl_node_serving_version"] == 1
    assert samples['async_rl_node_slots{state="active"}'] == 3
    assert samples['async_rl_node_slots{state="free"}'] == 1
    assert samples["async_rl_node_concurrency_limit"] == 4
    assert samples["async_rl_node_resident_policies"] == 2
    assert samples["async_rl_node_flips_total"] == samples["async_rl_node_policy_load_seconds_count"] == 2
    assert samples["async_rl_node_policy_load_seconds_sum"] == 1.8
    assert samples["async_rl_node_policy_failures_total"] == 1
    assert samples["async_rl_node_sampled_tokens_total"] == 70
    assert samples["async_rl_node_busy_seconds_total"] == 1.25
    assert samples["async_rl_node_scoring_queue"] == 2
    assert samples['async_rl_link_received_bytes_total{link="store"}'] == 20


def test_a_node_that_serves_nothing_yet_names_no_version(qwen: Any, tmp_path: Path) -> None:
    exporter, engine = Exporter(), qwen.engine(versions=())
    with exporter.serve(tmp_path, "node-0", {}):
        exporter.publish(NodeGauges(4, {}).reading(engine, tokens=0, steps=0, busy_s=0.0, scoring=0))
        samples = scrape(targets(tmp_path)["node-0"]["address"])
    assert "async_rl_node_serving_version" not in samples
    assert samples['async_rl_node_slots{state="free"}'] == 4
