"""
The script that mitmproxy runs: requests that match a rule fail accordingly, all others go as at a store of a profile.

Runs in mitmproxy's own environment, so it imports nothing of the project but what needs only Python's own library.
Rules and profile are set over HTTP, on the proxied port: `PUT /-/rules` with a list sets the rules, `GET /-/rules`
returns them with the number of requests that each affected; `PUT /-/store` sets profile and outage, `GET /-/store`
returns what was drawn. `tools.servers.faults.proxy` describes both.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

from mitmproxy import http

from tools.servers.faults.store_model import Fate, StoreModel
from tools.servers.faults.store_profiles import PROFILES

_RULES = "/-/rules"
_STORE = "/-/store"
_ERROR = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>injected fault</Message></Error>"
_CODES = {503: b"SlowDown", 500: b"InternalError", 403: b"AccessDenied", 404: b"NoSuchKey"}


class Faults:
    """Applies rules; mitmproxy calls `request` and `response`."""

    def __init__(self) -> None:
        self._rules: list[dict[str, Any]] = []

    async def request(self, flow: http.HTTPFlow) -> None:
        """Apply the fault of a request before it reaches the server."""
        if flow.request.path == _RULES:
            if flow.request.method == "PUT":
                self._rules = [{"seen": 0, "befallen": 0, **rule} for rule in json.loads(flow.request.get_content())]
            _answer(flow, self._rules)
            return
        rule = self._rule_for(flow.request)
        if rule is None:
            return
        if rule["fault"] == "delay":
            await asyncio.sleep(rule["seconds"])
        elif rule["fault"] == "hang":
            await asyncio.Event().wait()
        elif rule["fault"] == "refuse":
            _refuse(flow, rule["status"])
        elif rule["fault"] == "drop":
            flow.kill()
        else:
            flow.metadata["rule"] = rule

    async def response(self, flow: http.HTTPFlow) -> None:
        """Apply the fault of a server's answer."""
        rule = flow.metadata.get("rule")
        if rule is None or flow.response is None:
            return
        if rule["fault"] == "lose_response":
            flow.kill()
        elif rule["fault"] == "truncate":
            # The header still states the full length, so the client waits for more until the connection closes.
            flow.response.raw_content = (flow.response.raw_content or b"")[: rule["kept_bytes"]]
            flow.response.headers["connection"] = "close"

    def _rule_for(self, request: http.Request) -> dict[str, Any] | None:
        for rule in self._rules:
            if request.method != rule["method"] or not re.search(rule["path"], request.path):
                continue
            rule["seen"] += 1
            if rule["seen"] % rule["every"] or (rule["times"] is not None and rule["befallen"] >= rule["times"]):
                continue
            rule["befallen"] += 1
            return rule
        return None


class Store:
    """Lets requests go as at a store of a profile; runs after `Faults`, for requests that no rule has ended."""

    def __init__(self) -> None:
        self._model = StoreModel(PROFILES["local"], 0)

    async def request(self, flow: http.HTTPFlow) -> None:
        """Draw the fate of a request, and refuse it or end its connection if that is its fate."""
        if flow.request.path == _STORE:
            if flow.request.method == "PUT":
                self._set(json.loads(flow.request.get_content()))
            _answer(flow, self._model.drawn().to_dict())
        elif flow.response is None and flow.killable:
            fate = self._model.fate(flow.request.timestamp_start)
            flow.metadata["fate"] = fate, self._model
            if fate.outcome in ("refuse", "out"):
                _refuse(flow, 503)
            elif fate.outcome == "drop":
                flow.kill()

    async def response(self, flow: http.HTTPFlow) -> None:
        """Keep an answer back until it is due."""
        if "fate" not in flow.metadata or flow.response is None:
            return
        fate: Fate
        model: StoreModel
        fate, model = flow.metadata["fate"]
        if fate.outcome == "out":
            return
        now_s = time.time()
        due_s = model.answer_due_s(
            fate,
            flow.client_conn.peername[0],
            flow.request.timestamp_start,
            now_s,
            len(flow.request.raw_content or b""),
            len(flow.response.raw_content or b""),
        )
        await asyncio.sleep(max(0.0, due_s - now_s))
        if fate.outcome == "lose_response" and flow.killable:
            flow.kill()

    def _set(self, wanted: dict[str, Any]) -> None:
        if wanted["profile"] is not None:
            self._model = StoreModel(PROFILES[wanted["profile"]], wanted["seed"])
        self._model.is_out = wanted["is_out"]


def _answer(flow: http.HTTPFlow, value: Any) -> None:
    flow.response = http.Response.make(200, json.dumps(value), {"content-type": "application/json"})


def _refuse(flow: http.HTTPFlow, status: int) -> None:
    flow.response = http.Response.make(status, _ERROR % _CODES.get(status, b"Fault"))


addons = [Faults(), Store()]
