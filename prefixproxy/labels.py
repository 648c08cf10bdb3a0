"""Label values that stay few: the busiest names keep their own, every other one counts as `other`."""

from __future__ import annotations

from collections import OrderedDict

OTHER = "other"
TRIALS = 8
"""Requests a name needs before it may take one of the labels of the second half."""
CANDIDATES_PER_LABEL = 10
"""How many unlabelled names are remembered per label while they are on trial; the longest unseen is forgotten."""


class Labels:
    """A bounded set of label values for one metric family.

    A name that got a label keeps it for the life of the process: a series that changed its meaning, or vanished and
    came back, would make rates lie. The first half of the labels go to the first names seen, the second half to names
    seen `TRIALS` times, so one-off names (a script that puts a date into the model's name) cannot take them all.
    """

    def __init__(self, limit: int) -> None:
        if limit < 2:
            raise ValueError(f"a label set needs room for at least 2 names, not {limit}")
        self._limit = limit
        self._labelled: set[str] = set()
        self._on_trial: OrderedDict[str, int] = OrderedDict()

    def __call__(self, name: str) -> str:
        """The label of `name`, for one request of it. An empty name is "unknown"."""
        name = name or "unknown"
        if name in self._labelled:
            return name
        if len(self._labelled) >= self._limit:
            return OTHER
        if len(self._labelled) < self._limit // 2 or self._tried(name) >= TRIALS:
            self._on_trial.pop(name, None)
            self._labelled.add(name)
            return name
        return OTHER

    def __len__(self) -> int:
        return len(self._labelled)

    def _tried(self, name: str) -> int:
        trials = self._on_trial.pop(name, 0) + 1
        self._on_trial[name] = trials
        if len(self._on_trial) > self._limit * CANDIDATES_PER_LABEL:
            self._on_trial.popitem(last=False)
        return trials
