"""What `prefixproxy simulate` takes for each request, from 4 slots to 1,000: processor time and memory.

Run from the repository: `make bench-simulate` (`python -m tests.bench.simulate [--requests N] [--json]`). Arrivals are
made up, as many for each slot everywhere; each fleet runs in a process of its own, the smallest first.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from prefixproxy.simulate.play import Fleet, play
from prefixproxy.simulate.synthetic import synthetic

ARRIVALS_PER_SLOT_S = 0.12
PREFILL_PER_SLOT = 200.0
"""Tokens per second: a server with more slots is a faster one."""
FLEETS = ((4, 1), (100, 1), (1000, 1), (4, 25))
"""Slots of each server, servers."""


@dataclass(frozen=True)
class Measured:
    slots: int
    servers: int
    requests: int
    answered: int
    seconds: float
    """Of processor time."""
    peak_mb: float


def measure(slots: int, servers: int, requests: int) -> Measured:
    arrivals = synthetic("mixed", requests, ARRIVALS_PER_SLOT_S * slots * servers, random.Random(1))
    fleet = Fleet(slots, servers, prefill_rate=PREFILL_PER_SLOT * slots)
    started = time.process_time()
    outcome = play(arrivals, fleet, _progress(requests))
    spent = time.process_time() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Measured(slots, servers, requests, len(outcome.waits), spent, peak)


def _progress(total: int) -> Callable[[int], None]:
    def tell(ended: int) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{ended:,} of {total:,}")

    return tell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--fleet", help="SLOTSxSERVERS: measure this one alone, in this process")
    options = parser.parse_args()
    if options.fleet:
        slots, servers = map(int, options.fleet.split("x"))
        print(json.dumps(asdict(measure(slots, servers, options.requests))))
        return
    found = []
    for slots, servers in FLEETS:
        again = [sys.executable, "-m", "tests.bench.simulate", "--requests", str(options.requests)]
        run = subprocess.run([*again, "--fleet", f"{slots}x{servers}"], stdout=subprocess.PIPE, check=True)
        found.append(Measured(**json.loads(run.stdout)))
        if not options.json:
            print(_line(found[-1], found[0]), flush=True)
    if options.json:
        print(json.dumps([asdict(each) for each in found], indent=2))


def _line(each: Measured, first: Measured) -> str:
    rate, base = each.requests / each.seconds, first.requests / first.seconds
    return (
        f"{each.servers:>4} x {each.slots:>4} slots  {each.answered:>9,} of {each.requests:,} answered  "
        f"{rate:>7,.0f} requests/s ({rate / base:.2f} of the first)  {each.peak_mb:,.0f} MB"
    )


if __name__ == "__main__":
    main()
