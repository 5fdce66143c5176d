"""TLS sessions, which carry the certificate of their first handshake."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest
import trustme

from dstl_service.access.certificates import TlsSettings, server_contexts
from storage.testing import FakeClock


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, session: ssl.SSLSession | None) -> ssl.SSLObject:
    """Connect a client with a server in memory; return the client's end."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        server.wrap_bio(to_server, to_client, server_side=True),
        client.wrap_bio(to_client, to_server, server_hostname="localhost", session=session),
    ]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return ends[1]


def test_session_of_a_removed_authority_is_not_resumed(tmp_path: Path) -> None:
    """A client resumes its session only while its certificate authority is accepted."""
    server_authority, former, newer = trustme.CA(), trustme.CA(), trustme.CA()
    own, accepted = tmp_path / "own.pem", tmp_path / "accepted.pem"
    server_authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(own)
    former.cert_pem.write_to_path(accepted)
    clock = FakeClock()
    contexts = server_contexts(TlsSettings(own, client_ca_file=accepted), clock)
    client = ssl.create_default_context()
    server_authority.configure_trust(client)
    former.issue_cert("client").configure_cert(client)
    client.maximum_version = ssl.TLSVersion.TLSv1_2  # whose sessions are there when the handshake ends
    session = shake_hands(contexts(), client, None).session
    assert shake_hands(contexts(), client, session).session_reused

    newer.cert_pem.write_to_path(accepted)
    for path in (own, accepted):
        os.utime(path, (1, 1))
    clock.advance(2_000)

    with pytest.raises(ssl.SSLError):
        shake_hands(contexts(), client, session)
