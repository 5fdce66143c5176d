"""
This service's certificates, as a server and as a client of other services; reloaded when their files change.

Each new connection uses the current files, so a certificate can be replaced without a restart.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dstl_service.access.reread import Reread, warn_if_readable
from storage.clock import Clock
from storage.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """Encryption of TCP connections."""

    certificate_file: Path | None = None
    """Certificate chain in PEM; with it, TCP is HTTPS only. It is also the client certificate for other services. It is
    reloaded when it changes, as are the other files here."""
    key_file: Path | None = None
    """Its private key in PEM, if it is not in the same file; only the service's user should be able to read it."""
    ca_file: Path | None = None
    """CA certificates in PEM that verify services of other hosts; by default those of the system."""
    client_ca_file: Path | None = None
    """CA certificates in PEM that verify clients with a certificate in place of a token; `access_file` gives them their
    rights."""

    def __post_init__(self) -> None:
        if self.key_file is not None and self.certificate_file is None:
            raise InvalidInputError("tls.key_file is set without tls.certificate_file; set both or neither")
        if self.client_ca_file is not None and self.certificate_file is None:
            raise InvalidInputError("tls.client_ca_file is set without tls.certificate_file; set both or neither")
        for name in ("certificate_file", "key_file", "ca_file", "client_ca_file"):
            path = getattr(self, name)
            if path is not None and not os.access(path, os.R_OK):
                raise InvalidInputError(f"tls.{name} {path} cannot be read; check the path and its permissions")


def server_contexts(tls: TlsSettings, clock: Clock) -> Callable[[], ssl.SSLContext]:
    """
    Return a function that returns the current TLS context for a new connection of a listener.

    A context that replaces another one resumes none of its sessions: a session stands for the certificate that it began
    with, so a client could continue with a certificate of an authority that was removed.

    Raises:
        InvalidInputError: A file cannot be read, or is not a certificate or key.
    """
    current = Reread("certificate", _files(tls), lambda: _server_context(tls), clock, secret=False)
    return lambda: current.value


def client_context(tls: TlsSettings, clock: Clock) -> Callable[[], ssl.SSLContext]:
    """
    Return a function that returns the current TLS context for connections to other services.

    Raises:
        InvalidInputError: A file cannot be read, or is not a certificate or key.
    """
    current = Reread("certificate", _files(tls), lambda: _client_context(tls), clock, secret=False)
    return lambda: current.value


def _server_context(tls: TlsSettings) -> ssl.SSLContext:
    assert tls.certificate_file is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(tls.certificate_file, tls.key_file)
    warn_if_readable("key of the certificate", [tls.key_file or tls.certificate_file])
    if tls.client_ca_file is not None:
        context.load_verify_locations(tls.client_ca_file)
        context.verify_mode = ssl.CERT_OPTIONAL  # a client without one may have a token
    return context


def _client_context(tls: TlsSettings) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.ca_file)
    if tls.certificate_file is not None:
        context.load_cert_chain(tls.certificate_file, tls.key_file)
    return context


def _files(tls: TlsSettings) -> list[Path]:
    named = (tls.certificate_file, tls.key_file, tls.client_ca_file, tls.ca_file)
    return [path for path in named if path is not None]
