"""
Certificates of link listeners: made in memory for one process, and pinned by the hosts that connect.

No authority vouches for them: a task gets the certificate with the address from its driver, over Spark's own channel.
"""

from __future__ import annotations

import os
import ssl
import tempfile
from datetime import UTC, datetime

from storage.errors import InvalidInputError

_NOT_BEFORE = datetime(2000, 1, 1, tzinfo=UTC)
_NOT_AFTER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""RFC 5280's date for "no end": a certificate ends with its process, and no host's clock may end it before."""


def make_server_context() -> tuple[ssl.SSLContext, str]:
    """Return the TLS context of a listener with a new key, and its certificate in PEM."""
    from cryptography import x509  # takes 50 ms, which only a coordinator of several hosts needs
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dstl link")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    text = certificate.public_bytes(serialization.Encoding.PEM).decode()
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.TemporaryDirectory(prefix="dstl-") as folder:  # OpenSSL loads keys from files only; mode 0700
        path = os.path.join(folder, "key.pem")
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(secret + text.encode())
        context.load_cert_chain(path)
    return context, text


def pinned_context(certificate: str) -> ssl.SSLContext:
    """
    Return the TLS context of a client that accepts this one certificate only, whatever the server's name.

    Raises:
        InvalidInputError: It is not a certificate in PEM.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    try:
        context.load_verify_locations(cadata=certificate)
    except (ssl.SSLError, ValueError) as error:
        raise InvalidInputError("the link's certificate is not one in PEM") from error
    return context
