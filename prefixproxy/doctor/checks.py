"""The checks of a llama-server: each looks at one thing that defeats reuse or breaks answers.

Facts behind them are in docs/explanation/llama-server.md. What cannot be known gives no finding, or a note that says
how to make it known; a guess is never a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prefixproxy.doctor.evidence import Evidence
from prefixproxy.doctor.findings import Finding, error, note, warning
from prefixproxy.doctor.template import template_findings
from prefixproxy.verdicts import UNQUANTISED

USABLE_TOKENS = 2048
"""No agent's prompt and answer fit into less."""
COMFORTABLE_TOKENS = 4096
_MIB = 1 << 20

Check = Callable[[Evidence], Iterator[Finding]]


def llama_server_findings(seen: Evidence) -> list[Finding]:
    """All that is wrong with one llama-server."""
    found = [finding for check in CHECKS for finding in check(seen)]
    return found + template_findings(seen.template, seen.rendered, seen.today)


def more_context(seen: Evidence, tokens: int) -> str:
    """The flags that give each slot so many tokens."""
    n = seen.facts.n_slots or 1
    return f"-np {n} -c {n * tokens}" + (f", or fewer slots: -np 1 -c {tokens}" if n > 1 else "")


def _context(seen: Evidence) -> Iterator[Finding]:
    n_ctx_slot, n_slots = seen.facts.n_ctx_slot, seen.facts.n_slots or 1
    if n_ctx_slot is None:
        return
    wanted = seen.demand.min_n_ctx_slot
    needed = wanted or USABLE_TOKENS
    total = seen.total_ctx
    divided = n_slots > 1 and not seen.facts.kv_unified
    made = f"one slot of {n_ctx_slot:,} tokens"
    if divided:
        made = f"{n_slots} slots of {n_ctx_slot:,} tokens, {n_slots * n_ctx_slot:,} in all"
    if divided and total:
        made = f"-c {total:,} divided by {n_slots} slots is {total // n_slots:,}: n_ctx_slot is {n_ctx_slot:,}"
    why = (
        "-np divides the context. A longer prompt is refused, one that just fits gets an answer that loops or breaks "
        "off; nothing in the flags looks wrong."
    )
    if n_ctx_slot < needed:
        below = f"context.min_n_ctx_slot is {wanted:,}" if wanted else f"under {needed:,} no agent's prompt fits"
        name = "context-divided" if divided else "context-small"
        yield error(name, f"{made}, {below}", why, more_context(seen, max(needed, COMFORTABLE_TOKENS)))
    elif not wanted and n_ctx_slot < COMFORTABLE_TOKENS:
        name = "context-divided" if divided else "context-small"
        yield warning(name, made, why, more_context(seen, COMFORTABLE_TOKENS))
    longest = seen.demand.longest_prompt
    if longest and longest > n_ctx_slot:
        yield error(
            "context-exceeded",
            f"a prompt of {longest:,} tokens came, n_ctx_slot is {n_ctx_slot:,}",
            "It was refused, or answered by another upstream.",
            more_context(seen, -(-(longest + 512) // 256) * 256),
        )


def _capped(seen: Evidence) -> Iterator[Finding]:
    if seen.log is not None and seen.log.capped_from is not None:
        yield warning(
            "context-capped",
            f"{seen.log.capped_from:,} tokens per slot were asked for, the model was trained on fewer",
            "The server gives a slot no more than that; the memory of the rest is wasted.",
            f"-c {(seen.facts.n_slots or 1) * (seen.facts.n_ctx_slot or 0)}",
        )


def _unified(seen: Evidence) -> Iterator[Finding]:
    fix = f"-np {seen.facts.n_slots or 4} --no-kv-unified (and -c for all slots together)"
    empty = seen.trial.emptied if seen.facts.kv_unified is None else 0
    cleared = seen.trial.keeps_idle is False or empty > 0
    if not cleared and not seen.facts.kv_unified:
        unknown = seen.facts.kv_unified is None and seen.trial.keeps_idle is None
        if unknown and (seen.facts.n_slots or 1) > 1:
            yield note(
                "kv-unified-unknown",
                "neither the server's flags nor its startup log can be read, and nothing was tried",
                "With a unified KV cache, which -np unset means, every request clears the other slots.",
                "--log FILE with the server's startup log",
            )
        return
    flags, ram = seen.flags, seen.ram_mib
    holds = (flags is not None and flags.cache_idle_slots is False) or ram == 0
    if not cleared and holds:
        yield warning(
            "kv-unified",
            "one KV pool for all slots, idle slots are not cleared",
            "A prompt that finds no room purges idle slots one by one, and may fail every request that runs.",
            fix,
        )
        return
    told_by = seen.facts.told_by.get("kv_unified")
    told = "a slot that was idle lost its tokens when another one worked" if cleared else "kv_unified is true"
    if empty:
        told = f"{empty} of {seen.facts.n_slots} slots have answered and hold nothing now"
    yield error(
        "kv-unified",
        f"{told} ({told_by})" if told_by and not cleared else told,
        "Every request that starts saves and clears all idle slots, so one that is sent to the slot that held its "
        "prefix finds it empty and evaluates everything.",
        fix,
    )


def _ram_cache(seen: Evidence) -> Iterator[Finding]:
    why = (
        "It keeps conversations that lost their slot: 40 of them on 4 slots evaluated 1.46 times the least possible "
        "with it, 9.75 times without."
    )
    limit = seen.ram_mib
    if limit == 0:
        yield warning("ram-cache-off", "the prompt cache in RAM is disabled", why, "--cache-ram 8192 (the default)")
        return
    if limit is None and seen.trial.ram_cache is False:
        lost = "a prompt that had lost its slot was evaluated again in full"
        yield warning("ram-cache-off", lost, why, "--cache-ram 8192 (the default)")
        return
    per_token, tokens = seen.kv_bytes_per_token, seen.demand.conversation_tokens
    if limit is None or limit < 0 or per_token is None or not tokens:
        return
    needed = per_token * tokens / _MIB
    if needed > limit:
        held = f"{seen.demand.conversations} conversations of {tokens:,} tokens together take {needed:,.0f} MiB"
        fix = f"--cache-ram {int(needed * 1.2) + 1}"
        yield warning("ram-cache-small", f"{held}, --cache-ram is {limit:,}", why, fix)


def _slots(seen: Evidence) -> Iterator[Finding]:
    if not seen.capabilities.observe:
        yield error(
            "slots-hidden",
            "GET /slots is refused",
            "Without it nobody can tell which slot is idle, so no request can go to the slot that holds its prefix.",
            "--slots (and no --no-slots)",
        )
    elif not seen.capabilities.snapshot:
        yield warning(
            "no-save-path",
            "POST /slots/0?action=save is answered with 501",
            "A root cannot be copied from slot to slot, so every slot evaluates it once.",
            "--slot-save-path DIR/ (a private directory, best on a tmpfs; the path ends in a slash)",
        )
    if seen.save_dir_open:
        yield warning(
            "save-path-open",
            f"others on this machine can read {seen.flags.save_path if seen.flags else 'it'}",
            "Saved slots are as sensitive as the conversations in them.",
            "chmod 700 on that directory",
        )


def _restore(seen: Evidence) -> Iterator[Finding]:
    why = "Copying a root to another slot gains nothing: each lane evaluates it again."
    fix = "--swa-full" if seen.n_swa else 'upstreams.snapshots = "off", until another build mends it'
    if seen.trial.restore_works is False:
        told = seen.trial.restore_failed
        if seen.trial.restored is not None:
            expected, given = seen.trial.restored
            told = f"of {expected} tokens that were restored into an idle slot, {given} were reused"
        yield error("restore-without-effect", told, why, fix)
        return
    off = str((seen.behind.get("scheduler") or {}).get("snapshots_off_because") or "")
    if off and seen.capabilities.snapshot and not seen.behind.get("reuse_off"):
        yield warning("restore-without-effect", f"the proxy has stopped using snapshots: {off}", why, fix)


def _window(seen: Evidence) -> Iterator[Finding]:
    cells = seen.log.swa_cells if seen.log is not None else None
    full = bool(seen.flags is not None and seen.flags.swa_full) or (
        cells is not None and cells == seen.facts.n_ctx_slot
    )
    if not seen.n_swa or full:
        return
    known = seen.flags is not None or cells is not None
    evidence = f"the model has layers with a window of {seen.n_swa:,} tokens"
    evidence += ", and only that much of them is kept" if known else "; whether they are kept whole is not known"
    make = warning if known and not seen.trial.restore_works else note
    yield make(
        "swa-not-full",
        evidence,
        "Such a slot can only be continued: a prompt that parts from the one before it, or, in some builds, from a "
        "restored root, is evaluated in full where no checkpoint helps.",
        "--swa-full (it costs memory: see `prefixproxy plan`)",
    )


def _precision(seen: Evidence) -> Iterator[Finding]:
    types = seen.facts.kv_types
    if types is None or set(types) <= UNQUANTISED or seen.verified:
        return
    yield warning(
        "kv-quantised",
        f"the KV cache is K {types[0]}, V {types[1]}",
        "On some models a quantised cache garbles answers, on most it does not: it is to be shown for this one.",
        f"prefixproxy verify {seen.facts.url}, or -ctk f16 -ctv f16",
    )


def _corruption(seen: Evidence) -> Iterator[Finding]:
    if seen.verified is False:
        yield error(
            "verify-failed",
            "`prefixproxy verify` failed on this model, build and context",
            "Reuse changes answers there. A proxy with this state file reuses nothing on it.",
            f"another build, or KV types f16; then prefixproxy verify {seen.facts.url}",
        )
    elif seen.recorded_corruption and not seen.verified:
        yield error(
            "recorded-corruption",
            f"the model is {seen.facts.model or seen.arch}{f' ({seen.arch})' if seen.arch else ''}",
            "Reuse of a prefix was seen to change answers on this architecture (llama.cpp #26185).",
            f"prefixproxy verify {seen.facts.url}; until it has passed on this build, nothing is reused",
        )


def _sleep(seen: Evidence) -> Iterator[Finding]:
    seconds = seen.flags.sleep_s if seen.flags is not None else None
    if seen.props.get("is_sleeping") or (seconds is not None and seconds >= 0):
        state = "it sleeps now" if seen.props.get("is_sleeping") else f"it sleeps after {seconds} idle seconds"
        yield warning(
            "sleeps",
            state,
            "Sleeping ends all slots and the RAM cache, so the next request evaluates everything, after the model was "
            "loaded again.",
            "no --sleep-idle-seconds",
        )


def _switches(seen: Evidence) -> Iterator[Finding]:
    flags = seen.flags
    if flags is None:
        return
    if flags.cache_prompt is False:
        never = (
            "Nothing is reused unless a request asks for it. The proxy asks where it can: /v1/messages has no way to."
        )
        yield error("cache-prompt-off", "--no-cache-prompt is set", never, "no --no-cache-prompt")
    if flags.context_shift:
        yield warning(
            "context-shift",
            "--context-shift is set",
            "When a slot is full, half of it is thrown away: the next turn finds nothing of its prefix.",
            "no --context-shift",
        )
    if flags.cache_reuse:
        yield warning(
            "cache-reuse",
            f"--cache-reuse {flags.cache_reuse} is set",
            "It reuses chunks by moving their positions, which changes answers a little; prefixes need no such thing.",
            "--cache-reuse 0 (the default)",
        )


def _untried(seen: Evidence) -> Iterator[Finding]:
    if seen.trial.not_tried:
        yield note(
            "not-tried",
            seen.trial.not_tried,
            "Whether restored slots are reused and idle slots keep their tokens shows only by trying, which overwrites "
            "slots.",
            "--try, when nobody needs what its slots hold",
        )


def _metrics(seen: Evidence) -> Iterator[Finding]:
    if seen.props.get("endpoint_metrics") is False:
        why = "Its own counters cannot be compared with the proxy's."
        yield note("metrics-off", "/metrics is off", why, "--metrics")


CHECKS: tuple[Check, ...] = (
    _context,
    _capped,
    _unified,
    _ram_cache,
    _slots,
    _restore,
    _window,
    _precision,
    _corruption,
    _sleep,
    _switches,
    _untried,
    _metrics,
)
