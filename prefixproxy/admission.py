"""The admission settings while the proxy runs: read by every request, changed by PATCH, effective at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from prefixproxy.errors import UsageError
from prefixproxy.schedule.types import Policy
from prefixproxy.settings import Admission, amended

log = logging.getLogger(__name__)


def policy_of(admission: Admission) -> Policy:
    """The settings as the scheduler takes them."""
    return Policy(
        queue_limit=admission.queue_limit,
        max_concurrency=admission.concurrency,
        side_slots=admission.side_slots,
        policy=admission.policy,
        fork=admission.fork,
        root_threshold_s=admission.root_threshold,
    )


class AdmissionControl:
    """Holds the settings in force."""

    def __init__(
        self, admission: Admission, set_policy: Callable[[Policy], None], most_slots: Callable[[], int] = lambda: 0
    ) -> None:
        """`most_slots`: of the upstream that has most, 0 while none is known."""
        self._admission = admission
        self._most_slots = most_slots
        self._set_policy = set_policy

    def queue_timeout_s(self) -> float:
        return self._admission.queue_timeout

    def shown(self) -> dict[str, Any]:
        return self._admission.model_dump()

    def schema(self) -> dict[str, Any]:
        """The settings' types, bounds and descriptions, as JSON Schema."""
        return type(self._admission).model_json_schema()

    def change(self, changes: Mapping[str, Any], by: str = "") -> None:
        """`by`: who asked for it, for the log. Raises UsageError, and changes nothing, if any of them is wrong."""
        changed = amended(self._admission, changes)
        slots = self._most_slots()
        if "side_slots" in changes and 0 < slots <= changed.side_slots:
            raise UsageError(
                f"admission.side_slots: must leave a slot for other requests: at most {slots - 1} of the {slots} "
                f"there are (got {changed.side_slots})"
            )
        before, after = self.shown(), changed.model_dump()
        told = ", ".join(f"{key} {before[key]} -> {after[key]}" for key in after if before[key] != after[key])
        log.info("admission settings changed by %s: %s", by or "nobody known", told or "nothing is different")
        self._admission = changed
        self._set_policy(policy_of(changed))
