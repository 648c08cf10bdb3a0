"""What `lint` finds out: each request planned as a fresh proxy would, and compared with the ones before it.

Three states of every prompt are compared: *sent* by the client; *stabilised* by a proxy that has seen nothing but the
requests before it; *settled*, by one that has seen all of these requests change what they change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from prefixproxy.answers import AnswerMemory, value_of
from prefixproxy.chat import Canonical, canonical
from prefixproxy.lint.compare import Comparison, TokenCounter, compare
from prefixproxy.lint.input import Sample
from prefixproxy.lint.rules import Sighting, sightings, suggested_rules, tools_detail
from prefixproxy.plan import Mode, Planner
from prefixproxy.prefix import PrefixChain, chain_of, shared_bytes
from prefixproxy.prompt import Prompt, SetText
from prefixproxy.stabilise.learn import Suggestion
from prefixproxy.stabilise.stabiliser import StabilisePolicy, Stabiliser
from prefixproxy.tools import ToolMemory
from prefixproxy.types import Relocation
from prefixproxy.volatile.head import HeadReader
from prefixproxy.volatile.rules import RuleSet

MAX_TOOL_SETS, MAX_CALLS, MAX_MEMORY_BYTES = 1024, 16_384, 32 << 20
MAX_RIVALS = 16
"""Earlier requests that share equally many blocks, the newest of which are compared byte by byte."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One request as a proxy would send it: its canonical form, and what was done to get there."""

    form: Canonical
    family: str
    relocations: tuple[Relocation, ...]
    tools_restored: bool
    calls_restored: int
    taught: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Checked:
    """One request. `seen` is what rules know of its head, `taught` the suggestions it gave rise to."""

    sample: Sample
    sent: Canonical
    tokens: int
    head_tokens: int
    live: Planned
    seen: tuple[Sighting, ...]

    @property
    def taught(self) -> tuple[str, ...]:
        return self.live.taught


@dataclass(frozen=True, slots=True)
class Pair:
    """A request and an earlier one of its model, by number: the `previous` one, the `nearest` one (the longest shared
    prefix once settled), or both. `suggested`: with the suggested rules in force, None where there are none."""

    earlier: int
    later: int
    previous: bool
    nearest: bool
    sent: Comparison
    stabilised: Comparison
    settled: Comparison
    suggested: Comparison | None
    tools: str

    @property
    def still_breaks(self) -> bool:
        return self.nearest and self.settled.breaks


@dataclass(frozen=True, slots=True)
class Setup:
    """The proxy that is asked."""

    rules: RuleSet
    policy: StabilisePolicy = field(default_factory=StabilisePolicy)
    mode: Mode = "apply"


@dataclass(frozen=True, slots=True)
class Report:
    """Everything found. `note` says what is odd about the token counts; `suggestions` are about text that changes
    though no rule knows it, and look like state."""

    setup: Setup
    requests: tuple[Checked, ...]
    pairs: tuple[Pair, ...]
    suggestions: tuple[Suggestion, ...]
    tokenizer: str
    note: str = ""
    left_out: int = 0
    """Journal records among the input that hold no prompt to compare."""

    @property
    def ok(self) -> bool:
        """Whether nothing breaks the cache once stabilising is settled."""
        return not any(pair.still_breaks for pair in self.pairs)


def examine(samples: Sequence[Sample], setup: Setup, tokens: TokenCounter, tokenizer: str, note: str = "") -> Report:
    """Plan and compare these requests, in order."""
    parts: dict[bytes, bytes] = {}
    planner = _planner(setup)
    live = _run_live(planner, samples, parts)
    found = planner.stabiliser.suggestions()
    if setup.policy.learned == "apply":
        setup = replace(setup, rules=setup.rules.with_rules(suggested_rules(found)))
    settled = _run_settled(setup, samples, parts)
    suggestions = found if setup.policy.learned == "suggest" else ()
    helped: list[Planned] | None = None
    if suggestions and setup.mode == "apply":
        rules = setup.rules.with_rules(suggested_rules(suggestions))
        helped = _run_settled(replace(setup, rules=rules), samples, parts)
    names, reader = {s.name for s in suggestions}, HeadReader(setup.rules)
    requests = []
    for sample, now, later in zip(samples, live, settled, strict=True):
        sent = _interned(canonical(sample.prompt), parts)
        head = [p for p, (_, _, end) in zip(sent.parts, sent.segments, strict=True) if end <= sent.head_bytes]
        seen = sightings(reader, sample.prompt, now.relocations, later.relocations) if setup.mode != "off" else ()
        now = replace(now, taught=tuple(name for name in now.taught if name in names))
        requests.append(Checked(sample, sent, tokens.of(sent.parts), tokens.of(head), now, seen))
    pairs = _pairs(requests, settled, helped, tokens)
    return Report(setup, tuple(requests), pairs, tuple(suggestions), tokenizer, note)


def _planner(setup: Setup) -> Planner:
    tools, answers = ToolMemory(MAX_TOOL_SETS, MAX_MEMORY_BYTES), AnswerMemory(MAX_CALLS, MAX_MEMORY_BYTES)
    return Planner(Stabiliser(setup.rules, setup.policy), tools, answers, setup.mode)


def _run_live(planner: Planner, samples: Sequence[Sample], parts: dict[bytes, bytes]) -> list[Planned]:
    """Each request in order, one after the other, as the proxy takes them."""
    calls, out = _Calls(planner.answers), list[Planned]()
    for sample in samples:
        now = float(sample.number)
        planner.arrive(sample.api, sample.body, _ident(sample), now)
        planned = _plan(planner, sample, calls, parts)
        taught = tuple(s.name for s in planner.stabiliser.suggestions() if s.last_seen == now)
        out.append(replace(planned, taught=taught))
    return out


def _run_settled(setup: Setup, samples: Sequence[Sample], parts: dict[bytes, bytes]) -> list[Planned]:
    """The same with all of these requests seen before the first one is planned."""
    planner = _planner(setup)
    calls = _Calls(planner.answers)
    for sample in samples:
        planner.arrive(sample.api, sample.body, _ident(sample), float(sample.number))
    return [_plan(planner, sample, calls, parts) for sample in samples]


def _ident(sample: Sample) -> str:
    return f"lint-{sample.number}"


def _plan(planner: Planner, sample: Sample, calls: _Calls, parts: dict[bytes, bytes]) -> Planned:
    calls.learn(sample.prompt)
    plan = planner.plan(sample.api, sample.body, _ident(sample), float(sample.number))
    assert plan.canonical is not None
    arguments = {call.arguments_path for call in sample.prompt.tool_calls}
    tools = sample.prompt.tools_path
    return Planned(
        form=_interned(plan.canonical, parts),
        family=plan.family,
        relocations=plan.relocations,
        tools_restored=bool(tools) and any(edit.path[: len(tools)] == tools for edit in plan.edits),
        calls_restored=sum(isinstance(edit, SetText) and edit.path in arguments for edit in plan.edits),
    )


def _interned(form: Canonical, parts: dict[bytes, bytes]) -> Canonical:
    """The same form; equal parts of different requests are one object, as histories repeat."""
    return replace(form, parts=tuple(parts.setdefault(part, part) for part in form.parts))


class _Calls:
    """Answers are not in the input. A tool call's first spelling is taken for the one that the server produced."""

    def __init__(self, answers: AnswerMemory) -> None:
        self._answers = answers
        self._seen: set[tuple[str, str, bytes | None]] = set()

    def learn(self, prompt: Prompt) -> None:
        for call in prompt.tool_calls:
            key = call.id, call.name, value_of(call.arguments)
            if call.id and key not in self._seen:
                self._seen.add(key)
                self._answers.learn(call.id, call.name, call.arguments)


def _pairs(
    requests: Sequence[Checked], settled: Sequence[Planned], helped: Sequence[Planned] | None, tokens: TokenCounter
) -> tuple[Pair, ...]:
    finders: dict[str, _Nearest] = {}
    previous: dict[str, int] = {}
    out = []
    for at, request in enumerate(requests):
        model = request.sample.prompt.model
        finder = finders.setdefault(model, _Nearest([p.form for p in settled], tokens))
        near = finder.of(at)
        finder.add(at)
        for earlier in sorted({before for before in (previous.get(model), near) if before is not None}):
            a = requests[earlier]
            pair = Pair(
                earlier=a.sample.number,
                later=request.sample.number,
                previous=earlier == previous.get(model),
                nearest=earlier == near,
                sent=compare(a.sent, request.sent, tokens),
                stabilised=compare(a.live.form, request.live.form, tokens),
                settled=compare(settled[earlier].form, settled[at].form, tokens),
                suggested=compare(helped[earlier].form, helped[at].form, tokens) if helped else None,
                tools=tools_detail(a.sample.prompt, request.sample.prompt),
            )
            out.append(pair)
        previous[model] = at
    return tuple(out)


class _Nearest:
    """Finds the earlier request that shares the longest prefix: by block hashes, then byte by byte."""

    def __init__(self, forms: Sequence[Canonical], tokens: TokenCounter) -> None:
        self._forms = forms
        self._tokens = tokens
        self._by_hash: dict[int, list[int]] = {}
        self._all: list[int] = []

    def add(self, at: int) -> None:
        self._all.append(at)
        for digest in self._chain(at).hashes:
            self._by_hash.setdefault(digest, []).append(at)

    def of(self, at: int) -> int | None:
        """Where equally good ones differ from it in the same segment, the one with most text in common; then the
        newest."""
        rivals = self._rivals(self._chain(at).hashes)[-MAX_RIVALS:]
        form = self._forms[at]
        whole = b"".join(form.parts)
        shared = {r: shared_bytes(b"".join(self._forms[r].parts), whole) for r in rivals}
        if not shared:
            return None
        segment, _ = form.locate(max(shared.values()))
        best = [r for r in rivals if form.locate(shared[r])[0] == segment]
        if len(best) == 1:
            return best[0]
        found = {r: compare(self._forms[r], form, self._tokens) for r in best}
        return max(best, key=lambda r: (found[r].difference is None, found[r].overlap_bytes, r))

    def _rivals(self, hashes: Sequence[int]) -> list[int]:
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if hashes[middle - 1] in self._by_hash else (low, middle - 1)
        return self._by_hash[hashes[low - 1]] if low else self._all

    def _chain(self, at: int) -> PrefixChain:
        return chain_of(self._forms[at].parts)
