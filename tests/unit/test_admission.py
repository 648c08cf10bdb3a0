"""Admission settings changed while the proxy runs."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from prefixproxy.admission import AdmissionControl
from prefixproxy.errors import UsageError
from prefixproxy.schedule.types import Policy
from prefixproxy.settings import Admission


def control(slots: int = 0) -> tuple[AdmissionControl, list[Policy]]:
    told: list[Policy] = []
    return AdmissionControl(Admission(), told.append, lambda: slots), told


def test_a_change_is_told_and_shown() -> None:
    admission, told = control(slots=4)
    admission.change({"side_slots": 3, "queue_timeout": 5})
    assert (told[0].side_slots, admission.queue_timeout_s(), admission.shown()["side_slots"]) == (3, 5.0, 3)


def test_the_log_says_what_was_changed_into_what_and_by_whom(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    admission, _ = control(slots=4)
    admission.change({"queue_limit": 7, "fork": True, "queue_timeout": 5}, by="10.0.0.7 (team-a)")
    admission.change({}, by="::1")
    assert [record.message for record in caplog.records] == [
        "admission settings changed by 10.0.0.7 (team-a): queue_limit 256 -> 7, queue_timeout 600.0 -> 5.0",
        "admission settings changed by ::1: nothing is different",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"side_slots": 4},
            "admission.side_slots: must leave a slot for other requests: at most 3 of the 4 there are (got 4)",
        ),
        (
            {"side_slots": 99},
            "admission.side_slots: must leave a slot for other requests: at most 3 of the 4 there are (got 99)",
        ),
        ({"side_slots": -1}, "admission.side_slots: must be greater than or equal to 0 (got -1)"),
        ({"side_slots": True}, "admission.side_slots: must be a whole number, not true or false"),
        ({"side_slots": None}, "admission.side_slots: must be a whole number, not null"),
        ({"queue_limit": 0}, "admission.queue_limit: must be greater than or equal to 1 (got 0)"),
        ({"queue_limit": 10**30}, f"admission.queue_limit: must be less than or equal to 65536 (got {10**30})"),
        ({"queue_limit": 1.5}, "admission.queue_limit: must be a whole number (got 1.5)"),
        ({"queue_timeout": math.nan}, "admission.queue_timeout: must be a finite number (got nan)"),
        ({"queue_timeout": math.inf}, "admission.queue_timeout: must be a finite number (got inf)"),
        ({"queue_timeout": 0}, "admission.queue_timeout: must be greater than 0 (got 0)"),
        ({"queue_timeout": True}, "admission.queue_timeout: must be a number, not true or false"),
        ({"root_threshold": -1}, "admission.root_threshold: must be greater than or equal to 0 (got -1)"),
        ({"concurrency": -1}, "admission.concurrency: must be greater than or equal to 0 (got -1)"),
        ({"fork": 1}, "admission.fork: must be true or false, not a whole number"),
        ({"policy": "lifo"}, "admission.policy: must be one of 'cost' or 'fifo' (got 'lifo')"),
    ],
)
def test_a_value_that_cannot_be_is_refused_and_changes_nothing(changes: dict[str, Any], message: str) -> None:
    admission, told = control(slots=4)
    with pytest.raises(UsageError) as caught:
        admission.change({"queue_limit": 7, **changes})
    assert str(caught.value) == message
    assert (told, admission.shown()) == ([], Admission().model_dump())


def test_without_a_known_slot_any_number_may_be_kept() -> None:
    admission, _ = control(slots=0)
    admission.change({"side_slots": 99})
    assert admission.shown()["side_slots"] == 99
