"""
The script that mitmproxy runs: requests that match a rule fail accordingly.

Runs in mitmproxy's own environment, so it imports nothing of the project. Rules are set over HTTP, on the proxied port:
`PUT /-/rules` with a list sets them, `GET /-/rules` returns them with the number of requests that each affected.
`tools.servers.fault_proxy` describes the rules.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from mitmproxy import http

_CONTROL = "/-/rules"
_ERROR = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>injected fault</Message></Error>"
_CODES = {503: b"SlowDown", 500: b"InternalError", 403: b"AccessDenied", 404: b"NoSuchKey"}


class Faults:
    """Applies rules; mitmproxy calls `request` and `response`."""

    def __init__(self) -> None:
        self._rules: list[dict[str, Any]] = []

    async def request(self, flow: http.HTTPFlow) -> None:
        """Apply the fault of a request before it reaches the server."""
        if flow.request.path == _CONTROL:
            if flow.request.method == "PUT":
                self._rules = [{"seen": 0, "befallen": 0, **rule} for rule in json.loads(flow.request.get_content())]
            flow.response = http.Response.make(200, json.dumps(self._rules), {"content-type": "application/json"})
            return
        rule = self._rule_for(flow.request)
        if rule is None:
            return
        if rule["fault"] == "delay":
            await asyncio.sleep(rule["seconds"])
        elif rule["fault"] == "hang":
            await asyncio.Event().wait()
        elif rule["fault"] == "refuse":
            status = rule["status"]
            flow.response = http.Response.make(status, _ERROR % _CODES.get(status, b"Fault"))
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


addons = [Faults()]
