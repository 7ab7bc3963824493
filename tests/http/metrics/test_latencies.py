"""Latencies as clients see them, by model and protocol; and what is alerted on and drawn exists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml  # type: ignore[import-untyped]

from cairn.http.app import create_app
from cairn.http.metrics.latencies import PROTOCOLS, LatencyMetrics, Timed
from tests.http.fake_service import ACCEPTED, DELTAS, FINISHED, QUEUED, FakeService
from tests.support.in_process_server import chat, generate

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "cairn.json"


def clock(*times: float) -> Any:
    """A clock that gives these times, one at each look."""
    found = iter(times)
    return lambda: next(found)


async def sent(service: FakeService, metrics: LatencyMetrics, *times: float) -> None:
    """A request is answered; its arrival and its replies are at these times."""
    timed = Timed(service.for_tenant("local"), [metrics], clock(*times))
    async with timed.generate(generate(chat("Hello"), protocol="openai.chat")) as replies:
        async for _ in replies:
            pass


@pytest.fixture
def metrics() -> LatencyMetrics:
    """Those of a server that has answered nothing."""
    from prometheus_client import CollectorRegistry

    return LatencyMetrics(CollectorRegistry())


def sums(metrics: LatencyMetrics) -> dict[str, tuple[float, float]]:
    """(sum, count) of each histogram, and (value, 0) of each counter, without those that are 0."""
    found: dict[str, tuple[float, float]] = {}
    for name in ("first", "per_token", "whole", "queue", "prompt", "generated"):
        samples = {
            one.name.rsplit("_", 1)[-1]: one.value
            for family in getattr(metrics, name).collect()
            for one in family.samples
            if one.labels["protocol"] == "openai.chat"
        }
        value = (samples.get("sum", samples.get("total", 0.0)), samples.get("count", 0.0))
        if any(value):
            found[name] = value
    return found


@pytest.mark.trio
async def test_the_times_of_an_answer(metrics: LatencyMetrics) -> None:
    """From its arrival; those after the first token are shared among the others."""
    service = FakeService([QUEUED, ACCEPTED, *DELTAS[:2], FINISHED])
    await sent(service, metrics, 10.0, 11.0, 12.0, 14.0, 15.0, 20.0)
    assert {
        "queue": (2.0, 1),
        "first": (4.0, 1),
        "per_token": (3.0, 1),
        "whole": (10.0, 1),
        "prompt": (2048.0, 0),
        "generated": (3.0, 0),
    } == sums(metrics)


@pytest.mark.trio
async def test_an_answer_without_a_second_token(metrics: LatencyMetrics) -> None:
    """It has no time per token; one without any has no first one."""
    one = attrs.evolve(FINISHED, completion_tokens=1)
    await sent(FakeService([ACCEPTED, DELTAS[0], one]), metrics, 0.0, 1.0, 2.0, 3.0)
    none = attrs.evolve(FINISHED, completion_tokens=0)
    await sent(FakeService([ACCEPTED, none]), metrics, 0.0, 1.0, 3.0)
    found = sums(metrics)
    assert "per_token" not in found
    assert ((2.0, 1), (6.0, 2)) == (found["first"], found["whole"])


@pytest.mark.trio
async def test_further_answers_are_the_same_request(metrics: LatencyMetrics) -> None:
    """A request for two answers counts once, with the first of them."""
    other = [attrs.evolve(one, choice=1) for one in (ACCEPTED, FINISHED)]
    service = FakeService([ACCEPTED, other[0], DELTAS[0], FINISHED, other[1]])
    await sent(service, metrics, 0.0, 1.0, 2.0, 3.0, 4.0, 9.0)
    assert (4.0, 1) == sums(metrics)["whole"]


@pytest.mark.trio
async def test_a_request_that_broke_off(metrics: LatencyMetrics) -> None:
    """It has what came until then, and no duration."""
    service = FakeService([ACCEPTED, RuntimeError("no")])
    with pytest.RaisesGroup(RuntimeError, flatten_subgroups=True):
        await sent(service, metrics, 0.0, 1.0, 2.0)
    assert {"queue": (1.0, 1)} == sums(metrics)


async def scraped(accept: str = "") -> tuple[str, str]:
    """The metrics of a server that answered a request, and their content type."""
    client = create_app(FakeService()).test_client()
    ask = json.dumps({"messages": [{"role": "user", "content": "Hello"}]})
    assert 200 == (await client.post("/v1/chat/completions", data=ask)).status_code
    response = await client.get("/metrics", headers={"accept": accept})
    return await response.get_data(as_text=True), str(response.content_type)


@pytest.mark.trio
async def test_they_are_scraped() -> None:
    """Each protocol's series are there from the start; what was answered is in them."""
    text, kind = await scraped()
    assert kind.startswith("text/plain")
    name = "cairn_time_to_first_token_seconds_count"
    for protocol in PROTOCOLS:
        count = 1.0 if protocol == "openai.chat" else 0.0
        assert f'{name}{{model="cairn/small-1",protocol="{protocol}"}} {count}' in text
    assert 'cairn_kv_usage_ratio{tier="slabs"} 0.4' in text
    assert "process_cpu_seconds_total" in text
    assert re.search(r'cairn_build_info\{fingerprint="f+",model="cairn/small-1",version="', text)


@pytest.mark.trio
async def test_openmetrics_where_asked() -> None:
    """A scraper that accepts it gets it."""
    text, kind = await scraped("application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert text.rstrip().endswith("# EOF")


@pytest.mark.trio
async def test_names_that_a_linter_takes() -> None:
    """Counters end with _total and nothing else does; units are base units, and come last."""
    text, _ = await scraped()
    kinds = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
    helped = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP")}
    assert set(kinds) == helped
    for name, kind in kinds.items():
        assert re.fullmatch(r"[a-z_]+", name), name
        assert (kind == "counter") == name.endswith("_total"), name
        assert not re.search(r"(milli|micro|nano)seconds|(kilo|mega)bytes|_ms\b|_percent", name)
        assert not re.search(r"_(gauge|counter|histogram|summary)(_|$)", name), name


# --- alerts and the board ------------------------------------------------------------------------


def expressions() -> Iterator[tuple[str, str]]:
    """(where, expression) of each alert and panel."""
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"]


@pytest.mark.trio
async def test_what_is_alerted_on_and_drawn_exists() -> None:
    """Each name and label of an expression is in a scrape of a running server."""
    text, _ = await scraped()
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if (sample := re.match(r"(\w+)(?:\{(.*)\})? ", line)) and not line.startswith("#"):
            labels = re.findall(r'(\w+)="', sample[2] or "")
            found.setdefault(sample[1], set()).update(labels)
    count = 0
    for where, text_of in expressions():
        names = re.findall(r"\b(?:cairn|process)_\w+", text_of)
        assert names, where
        for name, labels in re.findall(r"\b((?:cairn|process)_\w+)(?:\{(.*?)\})?", text_of):
            assert name in found, (where, name)
            for label in re.findall(r"(\w+)[=!]~?\"", labels):
                assert label in {*found[name], "instance"}, (where, name, label)
            count += 1
        assert text_of.count("(") == text_of.count(")"), where
    assert count > 20


def test_each_alert_says_what_to_do() -> None:
    """It has a severity, a sentence, and a place on the page that says what to do."""
    page = (DEPLOY.parent / "docs" / "how-to" / "metrics-and-alerts.md").read_text()
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("page", "ticket")
            assert {"summary", "description", "runbook_url"} == set(rule["annotations"])
            anchor = rule["annotations"]["runbook_url"].rsplit("#", 1)[1]
            assert rule["alert"].lower() == anchor
            assert f"### {rule['alert']}\n" in page
