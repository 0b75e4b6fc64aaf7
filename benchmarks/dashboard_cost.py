"""What open dashboard pages cost the server: ``python -m benchmarks.dashboard_cost``.

Starts a server on an emulated device under a steady load, and measures the CPU time and the memory of all its processes
in windows that alternate: no page open, then ``--pages`` open in a real Chromium, whose own time does not count. The
difference is the cost: a share of one core, and what the processes gained more with pages open, the very first opening
included. Prints which processes the time goes to. Exits with 1 where a limit is exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Browser, sync_playwright

from benchmarks.common.servers import RunningServer, ServerCommand, free_port
from benchmarks.overload import PROFILE, Clients, Run
from services.bench.report import provenance, write_json
from services.launch.launch import EMBEDDED_NAME

PROGRAM = ("python", "-m", "benchmarks.dashboard_cost")
PAGES = "dashboard,dashboard/requests,dashboard/scheduler"
MAX_SHARE = 0.01
MAX_MB = 20.0
SETTLE_S = 3.0
READY_S = 300.0
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


@dataclass
class Windows:
    """CPU seconds a second of the server, by process, and MB that it gained, in windows of one kind."""

    by_process: list[Mapping[str, float]] = field(default_factory=list)
    gained_mb: list[float] = field(default_factory=list)

    @contextlib.contextmanager
    def memory_of(self, server: RunningServer) -> Iterator[None]:
        """Notes what the server gains meanwhile."""
        before_mb = _memory_mb(server)
        yield
        self.gained_mb.append(_memory_mb(server) - before_mb)

    @property
    def shares(self) -> list[float]:
        return [sum(window.values()) for window in self.by_process]

    def mean(self, process: str) -> float:
        return statistics.fmean(window.get(process, 0.0) for window in self.by_process)


class Load(threading.Thread):
    """Requests at a steady rate until ``stop``."""

    def __init__(self, port: int, rate: float, seed: int) -> None:
        super().__init__(daemon=True)
        self._port, self._rate, self._seed = port, rate, seed
        self._done = threading.Event()
        self.run_seen = Run(rate)

    def run(self) -> None:
        asyncio.run(self._send())

    async def _send(self) -> None:
        clients = Clients(self._port, self._seed)
        left: list[asyncio.Task[None]] = []
        while not self._done.is_set():
            left = [*(task for task in left if not task.done()), *await clients.arrivals(self.run_seen, 1.0)]
        await asyncio.gather(*left)
        await clients.close()

    def stop(self) -> None:
        self._done.set()
        self.join()


def measure(server: RunningServer, seconds: float) -> Mapping[str, float]:
    """CPU seconds a second of each process of the server, from now on."""
    processes = server.tree.processes()  # those that begin in the window are none of the dashboard's
    began, before = time.perf_counter(), cpu_s(processes)
    time.sleep(seconds)
    after, took_s = cpu_s(processes), time.perf_counter() - began
    return {name_of(each): (after[each] - before[each]) / took_s for each in processes if each in after}


def cpu_s(processes: Sequence[psutil.Process]) -> dict[psutil.Process, float]:
    """CPU seconds so far, of those that live."""
    used = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            used[process] = sum(process.cpu_times()[:2])
    return used


def name_of(process: psutil.Process) -> str:
    """Its pid and what it is; titles of Ray's actors change with what they do, so without the method."""
    try:
        title = " ".join(process.cmdline()[:3])[-60:] or process.name()
    except psutil.NoSuchProcess:
        title = "ended"
    return f"{process.pid} {title.split('.', 1)[0] if title.startswith('ray::') else title}"


def with_pages(browser: Browser, server: RunningServer, args: argparse.Namespace) -> tuple[Mapping[str, float], int]:
    """A window with the pages open, and the requests that they sent in it."""
    tabs = [browser.new_page(viewport={"width": 1400, "height": 900}) for _ in args.pages]
    asked: collections.Counter[str] = collections.Counter()
    for tab, page in zip(tabs, args.pages, strict=True):
        tab.on("request", lambda sent: asked.update([sent.url]))
        tab.goto(f"{server.command.base_url}/{page}")
    tabs[0].wait_for_timeout(1000 * SETTLE_S)  # what a page asks once is no part of what it costs to be open
    asked.clear()
    result: list[Mapping[str, float]] = []
    window = threading.Thread(target=lambda: result.append(measure(server, args.window)))
    window.start()
    while window.is_alive():
        tabs[0].wait_for_timeout(200)  # the browser's events are read meanwhile
    for tab in tabs:
        tab.close()
    return result[0], sum(asked.values())


def run(server: RunningServer, args: argparse.Namespace) -> tuple[Windows, Windows, int]:
    closed, opened, asked = Windows(), Windows(), 0
    with sync_playwright() as playwright:
        path = next(filter(None, map(shutil.which, CHROMIUM)), None)
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        with opened.memory_of(server):
            with_pages(browser, server, argparse.Namespace(**vars(args) | {"window": SETTLE_S}))  # code is warm
        for number in range(args.rounds):
            with closed.memory_of(server):
                time.sleep(SETTLE_S)
                closed.by_process.append(measure(server, args.window))
            with opened.memory_of(server):
                window, sent = with_pages(browser, server, args)
            opened.by_process.append(window)
            asked += sent
            print(f"round {number + 1}: {closed.shares[-1]:.4f} closed, {opened.shares[-1]:.4f} open", flush=True)
        browser.close()
    return closed, opened, asked


def report(closed: Windows, opened: Windows, asked: int, args: argparse.Namespace) -> dict[str, Any]:
    """Prints the figures; the median of the rounds' differences is the cost of the processors."""
    differences = [high - low for low, high in zip(closed.shares, opened.shares, strict=True)]
    names = sorted({name for window in opened.by_process for name in window})
    by_process = {name: opened.mean(name) - closed.mean(name) for name in names}
    cost = statistics.median(differences)
    gained_mb = sum(opened.gained_mb) - sum(closed.gained_mb)
    print(f"{len(args.pages)} pages open: {100 * cost:.2f} % of a core (rounds {_percents(differences)})")
    print(f"memory: {gained_mb:+.1f} MB with pages ({_sums(opened)} in their windows, {_sums(closed)} in the others)")
    print(f"the server without pages: {100 * statistics.fmean(closed.shares):.1f} % of a core")
    print(f"requests of the pages: {asked / (args.rounds * args.window):.2f} a second")
    for name, share in sorted(by_process.items(), key=lambda item: -item[1])[:6]:
        print(f"  {100 * share:6.2f} %  {name}")
    memory = {"gained_mb": gained_mb, "gained_open_mb": opened.gained_mb, "gained_closed_mb": closed.gained_mb}
    return {"cost": cost, "differences": differences, "closed": closed.shares, "by_process": by_process, **memory}


def _sums(windows: Windows) -> str:
    return f"{sum(windows.gained_mb):+.1f}"


def _percents(shares: list[float]) -> str:
    return ", ".join(f"{100 * share:.2f}" for share in shares)


def main() -> int:
    args = _parse()
    folder = Path(tempfile.mkdtemp(prefix="farsight-dashboard-"))
    server = RunningServer(_command(folder, args), folder / "server.log")
    load = Load(server.command.port, args.rate, args.seed)
    try:
        server.wait_until_ready(READY_S)
        load.start()
        time.sleep(SETTLE_S)
        closed, opened, asked = run(server, args)
        load.stop()
    finally:
        end = server.stop()
    figures = report(closed, opened, asked, args)
    print(f"answers to the load: {dict(load.run_seen.statuses)}")
    write_json(args.json, {**provenance(PROGRAM), **figures, "requests": asked, "end": end})
    return 1 if figures["cost"] > MAX_SHARE or figures["gained_mb"] > MAX_MB else 0


def _memory_mb(server: RunningServer) -> float:
    return server.tree.pss_bytes() / 1e6


def _command(folder: Path, args: argparse.Namespace) -> ServerCommand:
    (folder / "profile.json").write_text(json.dumps(PROFILE))
    port = free_port()
    words = [sys.executable, "-m", "services.cli", "serve", "--port", str(port)]
    words += ["--device", f"emulated:{folder / 'profile.json'}", "--kv-memory", "64MiB"]
    return ServerCommand([*words, *args.serve_options], port, EMBEDDED_NAME)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=lambda text: text.split(","), default=PAGES, help="addresses, by commas")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of windows")
    parser.add_argument("--window", type=float, default=30.0, help="seconds of a window")
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second, the load in all windows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("serve_options", nargs="*", help="after --: more arguments of farsight serve")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
