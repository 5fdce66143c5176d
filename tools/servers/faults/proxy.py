"""
mitmproxy in front of an HTTP server: answers that are errors, late, truncated or lost, by rules or by chance.

mitmproxy has an environment of its own in the stack folder, built once from `requirements-stack.txt`.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tools.servers.environments import environment
from tools.servers.faults.store_model import Drawn
from tools.servers.programs import PROJECT_ROOT, ServerError, ServerProcess

_SCRIPT = Path(__file__).with_name("proxy_script.py")
_REQUIREMENTS = PROJECT_ROOT / "requirements-stack.txt"
_TIMEOUT_S = 60.0

FaultName: TypeAlias = Literal["refuse", "delay", "hang", "drop", "lose_response", "truncate"]


@dataclass(frozen=True, slots=True)
class Rule:
    """
    A fault, and the requests that it affects. The first matching rule applies.

    Args:
        fault: "refuse" answers `status`; "delay" forwards the request after `seconds`; "hang" never does; "drop" ends
            the connection instead; "lose_response" ends it after the server has handled the request; "truncate" ends it
            after `kept_bytes` of the answer's body.
        method: Method of the request.
        path: Regular expression to find in path and query.
        times: Number of requests affected; None for all.
        every: Affect every n-th matching request.
        status: For "refuse".
        seconds: For "delay".
        kept_bytes: For "truncate".
    """

    fault: FaultName
    method: str = "PUT"
    path: str = ""
    times: int | None = None
    every: int = 1
    status: int = 503
    seconds: float = 0.0
    kept_bytes: int = 0


class FaultProxy(ServerProcess):
    """
    A mitmproxy in reverse mode that follows rules and the profile of a store; without both it changes nothing.

    Args:
        target: URL of the proxied server.
        folder: Folder of its log.
    """

    def __init__(self, target: str, folder: Path) -> None:
        super().__init__("fault proxy", folder / "fault-proxy.log")
        self._target = target
        self._folder = folder

    def command(self, port: int) -> tuple[Sequence[str], Mapping[str, str]]:
        """Run mitmproxy with the script."""
        options = {
            "keep_host_header": "true",  # S3 requests are signed with it
            "connection_strategy": "lazy",
            "flow_detail": "0",
            "confdir": str(self._folder / "mitmproxy"),
            "body_size_limit": "1g",
        }
        sets = [part for name, value in options.items() for part in ("--set", f"{name}={value}")]
        where = ["--listen-host", self.address, "--listen-port", str(port), "--mode", f"reverse:{self._target}"]
        command = [str(mitmproxy_program()), *where, *sets, "--scripts", str(_SCRIPT)]
        return command, {"PYTHONPATH": str(PROJECT_ROOT)}  # for the model of a store

    def set_rules(self, *rules: Rule) -> None:
        """Replace all rules."""
        self._control.ask("PUT", "rules", [asdict(rule) for rule in rules])

    def befallen(self) -> list[int]:
        """Return how many requests each rule has affected, in order."""
        return [rule["befallen"] for rule in self._control.ask("GET", "rules")]

    def set_store(self, profile: str, seed: int) -> None:
        """
        Let requests that no rule has ended go as at a store of this profile, and forget what was drawn.

        Args:
            profile: A name of `tools.servers.faults.store_profiles.PROFILES`.
            seed: Seed of all draws.
        """
        self._control.ask("PUT", "store", {"profile": profile, "seed": seed, "is_out": False})

    @property
    def store(self) -> StoreControl:
        """The control of the store for another process."""
        return StoreControl(self.address, self.port)

    @property
    def _control(self) -> _Control:
        return _Control(self.address, self.port)


class StoreControl:
    """
    The store of a fault proxy, from any process.

    Args:
        address: Address of the proxy.
        port: Port of the proxy.
    """

    def __init__(self, address: str, port: int) -> None:
        self._control = _Control(address, port)

    def set_out(self, *, is_out: bool) -> None:
        """Begin or end an outage: every request is answered with 503."""
        self._control.ask("PUT", "store", {"profile": None, "is_out": is_out})

    def drawn(self) -> Drawn:
        """Return what was drawn since the profile was set."""
        return Drawn.from_dict(self._control.ask("GET", "store"))


class _Control:
    """Asks the proxy's script."""

    def __init__(self, address: str, port: int) -> None:
        self._address = address
        self._port = port

    def ask(self, method: str, what: str, value: Any = None) -> Any:
        connection = http.client.HTTPConnection(self._address, self._port, timeout=_TIMEOUT_S)
        try:
            connection.request(method, f"/-/{what}", None if value is None else json.dumps(value))
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise ServerError(f"the fault proxy refused {method} of its {what}: {text!r}")
        return json.loads(text)


def mitmproxy_program() -> Path:
    """Return the program, in an environment that is rebuilt when the pins change."""
    return environment("mitmproxy", _REQUIREMENTS) / "bin" / "mitmdump"
