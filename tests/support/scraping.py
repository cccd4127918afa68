"""Reading /metrics as a Prometheus would: the files that name the targets, an HTTP request, the text parsed."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families


def targets(folder: Path) -> dict[str, dict[str, Any]]:
    """Labels and address of every target, by process."""
    found = {}
    for file in folder.glob("*.json"):
        for group in json.loads(file.read_text()):
            (address,) = group["targets"]
            found[group["labels"]["process"]] = {**group["labels"], "address": address}
    return found


def scrape(address: str) -> dict[str, float]:
    """Samples by name and labels, as Prometheus writes them: `name{label="value"}`."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            samples[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return samples
