"""What stabilising costs: one turn after the other of a 200 KB conversation with a clock in front, and a cold start.

    python -m tests.bench.stabilise [--turns 60] [--kilobytes 200] [--json]

Half of the prompt is the system text, half the history; each turn brings another time of day and one more note, so no
head is ever the same as one before. Parsing the body and rendering the edits are measured beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from random import Random

from prefixproxy.body import Body
from prefixproxy.chat import parse_prompt
from prefixproxy.stabilise.stabiliser import Stabiliser
from prefixproxy.types import Api
from prefixproxy.volatile.files import load_rules

WORDS = "the agent reads files before it changes them and runs tests of a package if time allows 10:30 session".split()


def prose(random: Random, n_bytes: int) -> str:
    lines, size = list[str](), 0
    while size < n_bytes:
        lines.append(random.choice(["", "- ", "## "]) + " ".join(random.choices(WORDS, k=random.randint(3, 30))))
        size += len(lines[-1]) + 1
    return "\n".join(lines)[:n_bytes]


def bodies(turns: int, n_bytes: int) -> list[bytes]:
    random = Random(1)
    system, each = prose(random, n_bytes // 2), n_bytes // (4 * turns)
    messages: list[dict[str, str]] = []
    out = []
    for turn in range(turns):
        messages.append({"role": "user", "content": prose(random, each)})
        clock = f"Current time: 10:{turn // 60:02}:{turn % 60:02}"
        head = {"role": "system", "content": f"{clock}\n{system}"}
        out.append(json.dumps({"model": "m", "messages": [head, *messages]}).encode())
        messages.append({"role": "assistant", "content": prose(random, each)})
    return out


def measured(raws: list[bytes]) -> dict[str, list[float]]:
    """Milliseconds of each step, request by request."""
    stabiliser = Stabiliser(load_rules())
    out: dict[str, list[float]] = {"parse": [], "stabilise": [], "render": []}
    for number, raw in enumerate(raws):
        times = [time.perf_counter()]
        body = Body.parse(raw)
        prompt = parse_prompt(Api.CHAT, body)
        assert prompt is not None
        times.append(time.perf_counter())
        done = stabiliser.apply(prompt, float(number), request_id=str(number))
        times.append(time.perf_counter())
        body.render(done.edits)
        times.append(time.perf_counter())
        for name, start, end in zip(out, times, times[1:], strict=False):
            out[name].append((end - start) * 1e3)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--kilobytes", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    args = parser.parse_args()
    raws = bodies(args.turns, args.kilobytes * 1000)
    table = {
        name: {"first": ms[0], "p50": statistics.median(ms[1:]), "p99": sorted(ms[1:])[int(0.99 * len(ms[1:]))]}
        for name, ms in measured(raws).items()
    }
    if args.json:
        print(json.dumps({"bytes": len(raws[-1]), "ms": table}))
        return
    print(f"{len(raws[-1]) / 1000:.0f} KB at the last of {args.turns} turns; milliseconds")
    print(f"{'':>10} {'first':>8} {'p50':>8} {'p99':>8}")
    for name, row in table.items():
        print(f"{name:>10} {row['first']:8.2f} {row['p50']:8.2f} {row['p99']:8.2f}")


if __name__ == "__main__":
    main()
