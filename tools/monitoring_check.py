"""
The alert rules and the dashboard in a real Prometheus, beside a running server.

``python -P tools/monitoring_check.py`` (``make monitoring``) has promtool check the rules, run
their tests, and check a scrape. Then it starts ``ops serve`` with the built-in model and a
Prometheus that scrapes it each second, sends requests for a while, and evaluates each query of the
dashboard, which has to give a value, and each alert, none of which may fire. It needs
``prometheus`` and ``promtool`` (Debian's package prometheus).
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from cairn_clients.sdk_tests import served

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yml"
TALK_S = 20.0
VARIABLES = {"$instance": ".*", "$__rate_interval": "1m", "$__range": "5m"}


def main() -> int:
    """Run it; 1 if anything is not as it should be."""
    for program in ("prometheus", "promtool"):
        if shutil.which(program) is None:
            raise SystemExit(f"{program} is not installed: apt-get install prometheus")
    run("promtool", "check", "rules", str(RULES))
    run("promtool", "test", "rules", str(RULES.with_name("alerts_test.yml")))
    with tempfile.TemporaryDirectory() as place, served(None) as url:
        talk(url, seconds=1)
        scrape = httpx.get(f"{url}/metrics", timeout=60).text
        run("promtool", "check", "metrics", given=scrape)
        with prometheus(Path(place), url.removeprefix("http://")) as base:
            talk(url, seconds=TALK_S)
            faults = [*dashboard_faults(base), *alert_faults(base)]
    print("\n".join(faults) or "monitoring: each query gives a value, and no alert fires")
    return 1 if faults else 0


def run(*command: str, given: str | None = None) -> None:
    """Run a command, and end if it fails."""
    done = subprocess.run(command, input=given, text=True, capture_output=True, check=False)
    print(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}", end="")
    if done.returncode:
        raise SystemExit(1)


def talk(url: str, *, seconds: float) -> None:
    """Send turns of conversations, one after the other."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        messages = [{"role": "user", "content": "Where does the path over the hill begin? " * 8}]
        for _ in range(3):
            body = {"messages": messages, "max_tokens": 16}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
            answer.raise_for_status()
            messages.append(answer.json()["choices"][0]["message"])
            messages.append({"role": "user", "content": "And then?"})


@contextlib.contextmanager
def prometheus(place: Path, target: str) -> Iterator[str]:
    """A Prometheus that scrapes the server; its address."""
    config = place / "prometheus.yml"
    config.write_text(
        f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: ['{RULES}']\n"
        f"scrape_configs: [{{job_name: cairn, static_configs: [{{targets: ['{target}']}}]}}]\n",
        encoding="utf-8",
    )
    log = place / "log"
    with log.open("wb") as written:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={place / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=written,
            stderr=subprocess.STDOUT,
        )
    try:
        yield f"http://{address(process, log)}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where it listens, as it says in its log."""
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        if found := re.search(r"127\.0\.0\.1:[1-9]\d*", log.read_text("utf-8")):
            return found[0]
        time.sleep(0.1)
    raise SystemExit(f"Prometheus did not start:\n{log.read_text('utf-8')}")


def dashboard_faults(base: str) -> Iterator[str]:
    """Each query of the dashboard that fails, or finds no series."""
    found = json.loads((DEPLOY / "grafana" / "cairn.json").read_text("utf-8"))
    for panel in found["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            answer = asked(base, "query", query=query)
            print(f"{panel['title']}: {[value['value'][1] for value in answer['result']]}")
            if not answer["result"]:
                yield f"{panel['title']}: no series: {query}"


def alert_faults(base: str) -> Iterator[str]:
    """Each rule that cannot be evaluated, or fires."""
    (group,) = asked(base, "rules")["groups"]
    for rule in group["rules"]:
        print(f"{rule['name']}: {rule['health']}, {rule['state']}")
        if (rule["health"], rule["state"]) != ("ok", "inactive"):
            yield f"{rule['name']}: {rule['health']}, {rule['state']}, {rule.get('lastError')}"


def asked(base: str, what: str, **parameters: str) -> Any:
    """An answer of Prometheus' API."""
    answer = httpx.get(f"{base}/api/v1/{what}", params=parameters, timeout=60)
    answer.raise_for_status()
    return answer.json()["data"]


if __name__ == "__main__":
    sys.exit(main())
