"""A certificate that signs itself, for an address or a name."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

YEAR = datetime.timedelta(days=365)


def make_certificate(folder: Path, host: str = "127.0.0.1") -> Path:
    """Writes ``cert.pem`` and ``key.pem`` into the folder; returns the certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([_alternative(host)])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = (
        builder.serial_number(x509.random_serial_number()).not_valid_before(now - YEAR).not_valid_after(now + YEAR)
    )
    certificate = builder.add_extension(address, critical=False).sign(key, hashes.SHA256())
    file = folder / "cert.pem"
    file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "key.pem").write_bytes(secret)
    return file


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
