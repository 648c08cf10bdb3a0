"""Watches every request and changes none: the record, the counters, the journal and one log line for each.

A mistake in here is logged and never reaches a client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from prefixproxy.classify import History
from prefixproxy.exchange import Exchange
from prefixproxy.journal import Journal, record_json
from prefixproxy.metrics import Metrics
from prefixproxy.types import Outcome, RequestRecord

log = logging.getLogger("prefixproxy.requests")
