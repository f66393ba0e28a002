"""Certificates for tests, generated in Python so that the machine needs no openssl.

The keys are elliptic-curve keys (P-256), signed with SHA-256 and written as X.509 version 3 and PKCS#8. The code is
slow and not hardened: use it only in tests.
"""

import base64
import hashlib
import ipaddress
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

_P = 2**256 - 2**224 + 2**192 + 2**96 - 1
_N = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_G = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
_Point = tuple[int, int] | None

_SEQUENCE, _SET, _INTEGER, _BITS, _OCTETS, _OID, _UTF8, _TIME, _TRUE = 48, 49, 2, 3, 4, 6, 12, 24, b"\x01\x01\xff"
_ECDSA_SHA256 = "1.2.840.10045.4.3.2"
_EC_KEY, _P256 = "1.2.840.10045.2.1", "1.2.840.10045.3.1.7"
_COMMON_NAME, _SUBJECT_ALT_NAME, _BASIC_CONSTRAINTS = "2.5.4.3", "2.5.29.17", "2.5.29.19"


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate and its key, both as PEM text."""

    name: str
    certificate: str
    key: str
    private: int


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A private key, and the point on the curve that is its public key."""

    private: int
    point: tuple[int, int]

    @classmethod
    def create(cls) -> "KeyPair":
        """Create a random key pair."""
        private = secrets.randbelow(_N - 1) + 1
        public = _multiplied(private)
        return cls(private, (int.from_bytes(public[1:33]), int.from_bytes(public[33:])))

    def sign(self, message: bytes) -> bytes:
        """Return the ECDSA signature of a message: the two numbers in 32 bytes each."""
        return b"".join(number.to_bytes(32) for number in _signature(self.private, message))


def self_signed(name: str, addresses: tuple[str, ...] = (), *, until_days: int = 9) -> Identity:
    """Create a certificate for a common name and IP addresses.

    It is valid for ten days, which end `until_days` from now.
    """
    return _made(name, addresses, until_days, None)


def signed_by(authority: Identity, name: str, *, until_days: int = 9) -> Identity:
    """Create a certificate signed by `authority`.

    Java accepts an expired certificate that is itself in the trust store, so tests of expiry need a signed one.
    """
    return _made(name, (), until_days, authority)


def _made(name: str, addresses: tuple[str, ...], until_days: int, authority: Identity | None) -> Identity:
    private = secrets.randbelow(_N - 1) + 1
    public = _multiplied(private)
    end = datetime.now(UTC) + timedelta(days=until_days)
    issuer = authority or Identity(name, "", "", private)
    algorithm = _der(_SEQUENCE, _oid(_ECDSA_SHA256))
    body = _der(
        _SEQUENCE,
        _der(0xA0, _integer(2)),
        _integer(secrets.randbits(64) | 1),
        algorithm,
        _named(issuer.name),
        _der(_SEQUENCE, _moment(end - timedelta(days=10)), _moment(end)),
        _named(name),
        _der(_SEQUENCE, _der(_SEQUENCE, _oid(_EC_KEY), _oid(_P256)), _der(_BITS, b"\0" + public)),
        _der(0xA3, _der(_SEQUENCE, *_extensions(addresses))),
    )
    certificate = _der(_SEQUENCE, body, algorithm, _der(_BITS, b"\0" + _signed(issuer.private, body)))
    key = _der(_SEQUENCE, _integer(1), _der(_OCTETS, private.to_bytes(32)), _der(0xA1, _der(_BITS, b"\0" + public)))
    wrapped = _der(_SEQUENCE, _integer(0), _der(_SEQUENCE, _oid(_EC_KEY), _oid(_P256)), _der(_OCTETS, key))
    return Identity(name, _pem("CERTIFICATE", certificate), _pem("PRIVATE KEY", wrapped), private)


def _named(name: str) -> bytes:
    return _der(_SEQUENCE, _der(_SET, _der(_SEQUENCE, _oid(_COMMON_NAME), _der(_UTF8, name.encode()))))


def _extensions(addresses: tuple[str, ...]) -> list[bytes]:
    authority = _der(_SEQUENCE, _oid(_BASIC_CONSTRAINTS), _TRUE, _der(_OCTETS, _der(_SEQUENCE, _TRUE)))
    names = b"".join(_der(0x87, ipaddress.ip_address(address).packed) for address in addresses)
    alternatives = _der(_SEQUENCE, _oid(_SUBJECT_ALT_NAME), _der(_OCTETS, _der(_SEQUENCE, names)))
    return [authority, alternatives] if addresses else [authority]


def _signed(private: int, message: bytes) -> bytes:
    r, s = _signature(private, message)
    return _der(_SEQUENCE, _integer(r), _integer(s))


def _signature(private: int, message: bytes) -> tuple[int, int]:
    digest = int.from_bytes(hashlib.sha256(message).digest())
    once = secrets.randbelow(_N - 1) + 1
    r = int.from_bytes(_multiplied(once)[1:33]) % _N
    return r, pow(once, -1, _N) * (digest + r * private) % _N


def _multiplied(factor: int) -> bytes:
    """Multiply the base point by `factor` and return the result uncompressed."""
    result: _Point = None
    addend: _Point = _G
    while factor:
        if factor & 1:
            result = _added(result, addend)
        addend = _added(addend, addend)
        factor >>= 1
    assert result is not None
    return b"\x04" + result[0].to_bytes(32) + result[1].to_bytes(32)


def _added(one: _Point, other: _Point) -> _Point:
    if one is None or other is None:
        return one or other
    if one[0] == other[0] and (one[1] + other[1]) % _P == 0:
        return None
    if one == other:
        slope = (3 * one[0] ** 2 - 3) * pow(2 * one[1], -1, _P) % _P
    else:
        slope = (other[1] - one[1]) * pow(other[0] - one[0], -1, _P) % _P
    x = (slope**2 - one[0] - other[0]) % _P
    return x, (slope * (one[0] - x) - one[1]) % _P


def _der(tag: int, *contents: bytes) -> bytes:
    content = b"".join(contents)
    length = len(content)
    if length < 128:
        return bytes([tag, length]) + content
    size = length.to_bytes((length.bit_length() + 7) // 8)
    return bytes([tag, 0x80 | len(size)]) + size + content


def _integer(value: int) -> bytes:
    return _der(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1))


def _moment(value: datetime) -> bytes:
    return _der(_TIME, value.strftime("%Y%m%d%H%M%SZ").encode())


def _oid(dotted: str) -> bytes:
    first, second, *others = (int(part) for part in dotted.split("."))
    encoded = bytearray([40 * first + second])
    for part in others:
        digits = [part & 0x7F]
        while part := part >> 7:
            digits.append(0x80 | part & 0x7F)
        encoded += bytes(reversed(digits))
    return _der(_OID, bytes(encoded))


def _pem(kind: str, content: bytes) -> str:
    text = base64.encodebytes(content).decode()
    return f"-----BEGIN {kind}-----\n{text}-----END {kind}-----\n"
