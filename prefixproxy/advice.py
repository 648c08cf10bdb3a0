"""What to change, in one sentence: for a request, by its outcome and its miss reason, and for each rule that acted."""

from __future__ import annotations

from prefixproxy.types import MissReason, Outcome, RequestRecord
from prefixproxy.volatile.rules import RuleSet

ADVICE: dict[MissReason, str] = {
    MissReason.NONE: "Nothing to change: everything that could be reused was.",
    MissReason.COLD_ROOT: "Nothing to change if it happens once per root; if it repeats, give agents that could share a"
    " briefing the same bytes, or send one request ahead of the fan-out.",
    MissReason.ROOT_CHANGED: "Move what changed behind the shared text: paste the suggested rule into a file named in"
    " stabilise.rules, or write the changing value into the newest user message.",
    MissReason.TOOLS_CHANGED: "Send one tool list, with the same definitions, from all lanes of a family; their order"
    " does not matter.",
    MissReason.HISTORY_CHANGED: "Let the client keep its history as it was sent, and compact rarely and at a fixed"
    " size: every edit is paid from there to the end.",
    MissReason.SLOT_EVICTED: "Give the server more slots (-np), run fewer lanes at once (admission.concurrency), or set"
    " admission.side_slots so that titles and summaries stay out of the slots that matter.",
    MissReason.FORK_FAILED: "Start llama-server with --slot-save-path on a disk with room, and read the proxy's log for"
    " the warm-up or copy that failed.",
    MissReason.NO_ROLLBACK: "Leave snapshots on (upstreams.snapshots), and start sliding-window models with --swa-full:"
    " this model's memory cannot be cut back to a prefix.",
    MissReason.UPSTREAM_RESTARTED: "Nothing to change in the prompt: the server restarted and lost its cache; find out"
    " why it did.",
    MissReason.REUSE_OFF: 'Set reuse.mode = "on": this request ran without reuse.',
    MissReason.UNKNOWN: "Compare what the chat template renders for this turn and the one before (POST"
    " /apply-template): the proxy sees no difference that explains it, or the server reported no count.",
}
"""One sentence for each reason."""

OUTCOME_ADVICE: dict[Outcome, str] = {
    Outcome.UPSTREAM_ERROR: "Read the upstream's own error and its log: it failed on this request.",
    Outcome.CLIENT_GONE: "Raise the client's timeout if it gave up waiting; what was evaluated by then stays cached.",
    Outcome.REJECTED: "Read the error that the client got: it was refused before it was sent.",
    Outcome.TIMED_OUT: "Raise admission.queue_timeout, run fewer lanes at once, or give the server more slots.",
    Outcome.UPSTREAM_DOWN: "Start the upstream, or correct its URL: none was ready.",
    Outcome.BAD_REQUEST: "Correct the request: the error the client got says what is wrong with it.",
}
"""One sentence for each outcome but ok."""

REFUSAL_ADVICE: dict[int, str] = {
    401: "Give the client a valid API key: it sent none, or one that nobody here has.",
    403: "Give the client a key that may do this: the upstream refused it.",
    429: "Let the client wait and try again (Retry-After says how long), or raise admission.queue_limit.",
}
"""One sentence for each status that a refusal has."""
TOO_LONG = (
    "Send a shorter prompt, or give each slot more context (a larger -c, a smaller -np; for a tenant"
    " tenants.max_context): it did not fit."
)

RULE_ADVICE: dict[str, str] = {
    "clock": "Move the clock into the newest user message, or tell the date only.",
    "date": "Move the date into the newest user message; at midnight it changes for everybody.",
    "lane": "Name the lane in its own user message, not in the system prompt.",
    "session": "Keep the session id out of the prompt, or put it into a user message.",
    "run": "Keep the run id out of the prompt, or put it into a user message.",
    "request": "Keep the request id out of the prompt: it differs every time.",
    "worker": "Name the worker in its own user message, not in the system prompt.",
    "counter": "Put counters (turn, step, tokens left) into the newest user message.",
    "cwd": "Tell the working directory in the first user message, behind what all projects share.",
    "env": "Tell the environment (folder, platform, date) in the first user message, behind what all sessions share.",
    "git": "Tell the git status in a user message: it changes with every edit.",
    "claude-code-git-status": "Tell the git status in a user message: it changes with every edit.",
    "memory": "Put what the memory search found into the newest user message.",
    "metadata": "Keep ids of the newest message in that message.",
    "state": "Put state (devices, entities) into the newest user message, where only the newest copy counts.",
    "generated": "Leave out the stamp of when a map or list was generated.",
}
"""One sentence for each topic of a rule: what the client could do itself."""
OTHER_RULE = "Put this text into the newest user message, behind what the requests share."
STRIPPED = "Switch the line off in the client if it can be: it is no prompt text, and the proxy drops it."


def advice(record: RequestRecord) -> str:
    """One sentence: what to change."""
    if record.outcome is Outcome.REJECTED:
        return _refused(record)
    if record.outcome is not Outcome.OK:
        return OUTCOME_ADVICE[record.outcome]
    return ADVICE[record.miss_reason]


def _refused(record: RequestRecord) -> str:
    if record.context_exceeded:
        return TOO_LONG
    return REFUSAL_ADVICE.get(record.status, OUTCOME_ADVICE[Outcome.REJECTED])


def rule_advice(rules: RuleSet) -> dict[str, str]:
    """The sentence for each rule, by its name."""
    return {
        rule.name: STRIPPED if rule.treatment == "strip" else RULE_ADVICE.get(rule.topic, OTHER_RULE)
        for rule in rules.rules
    }
