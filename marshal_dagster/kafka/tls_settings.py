"""The TLS fields of a connection: which ones fit together, and what librdkafka and Spark's Kafka client get.

The authorities come from a PEM file or PEM text. The client's certificate and key come from PEM files, PEM texts or a
PKCS#12 key store.
"""

import re
from typing import Any, Final

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.kafka.authentication import Fields, useless
from marshal_dagster.kafka.secret_text import SecretText, read_pem_file, secret_of

TLS_FIELDS: Final = (
    "ssl_ca_location",
    "ssl_ca_pem",
    "ssl_certificate_location",
    "ssl_certificate_pem",
    "ssl_key_location",
    "ssl_key_pem",
    "ssl_key_password",
    "ssl_key_password_file",
    "ssl_keystore_location",
    "ssl_keystore_password",
    "ssl_keystore_password_file",
)
"""All fields that are for TLS only."""
_CERTIFICATE: Final = ("ssl_certificate_location", "ssl_certificate_pem")
_KEY: Final = ("ssl_key_location", "ssl_key_pem")
_KEY_PASSWORD: Final = ("ssl_key_password", "ssl_key_password_file")
_STORE_PASSWORD: Final = ("ssl_keystore_password", "ssl_keystore_password_file")
EXCLUSIVE_FIELDS: Final = (("ssl_ca_location", "ssl_ca_pem"), _CERTIFICATE, _KEY, _KEY_PASSWORD, _STORE_PASSWORD)
_HOST_CHECK: Final = "ssl.endpoint.identification.algorithm"


def tls_problems(fields: Fields, *, uses_tls: bool, reads_files: bool = True) -> list[str]:
    """Return what is wrong with the fields that are for TLS, each with what would be right.

    Args:
        fields: The connection's fields, each of which is valid by itself.
        uses_tls: Whether the security protocol has TLS.
        reads_files: Whether the key's file may be read, to see whether it is encrypted.

    Returns:
        The problems.
    """
    given = {name for name in TLS_FIELDS if fields[name] is not None}
    if given and not uses_tls:
        names = [name for name in TLS_FIELDS if name in given]
        return [useless(names, fields["security_protocol"], "SSL or SASL_SSL")]
    twice = [f"set {' or '.join(names)}, not both" for names in EXCLUSIVE_FIELDS if given.issuperset(names)]
    if twice:
        return twice
    if "ssl_keystore_location" in given:
        return _key_store_problems(given)
    if given & set(_STORE_PASSWORD):
        return [f"{_first(given, _STORE_PASSWORD)} needs ssl_keystore_location"]
    certificate, key = given & set(_CERTIFICATE), given & set(_KEY)
    if not certificate and not key and given & set(_KEY_PASSWORD):
        return [f"{_first(given, _KEY_PASSWORD)} needs ssl_key_location or ssl_key_pem"]
    if bool(certificate) != bool(key):
        certificate_or_key = "ssl_certificate_location (or ssl_certificate_pem) and ssl_key_location (or ssl_key_pem)"
        return [f"a client's certificate and its key belong together: set {certificate_or_key}, or neither"]
    if key and not given & set(_KEY_PASSWORD) and "ENCRYPTED" in _text_of_key(fields, reads_files=reads_files):
        return [f"the key in {key.pop()} is encrypted: set ssl_key_password or ssl_key_password_file"]
    return []


def _key_store_problems(given: set[str]) -> list[str]:
    surplus = [name for name in (*_CERTIFICATE, *_KEY, *_KEY_PASSWORD) if name in given]
    problems = []
    if surplus:
        problems.append(
            f"ssl_keystore_location has the client's certificate and key: remove {' and '.join(surplus)}, or the key "
            "store"
        )
    if not given & set(_STORE_PASSWORD):
        problems.append("ssl_keystore_location needs ssl_keystore_password or ssl_keystore_password_file")
    return problems


def _first(given: set[str], names: tuple[str, ...]) -> str:
    return next(name for name in names if name in given)


def librdkafka_settings(fields: Fields) -> dict[str, Any]:
    """Return librdkafka's settings for TLS, with the secrets as plain text.

    Raises:
        ConfigurationError: The file of a secret cannot be read.
    """
    key = fields["ssl_key_pem"]
    settings = {
        "ssl.ca.location": fields["ssl_ca_location"],
        "ssl.ca.pem": fields["ssl_ca_pem"],
        "ssl.certificate.location": fields["ssl_certificate_location"],
        "ssl.certificate.pem": fields["ssl_certificate_pem"],
        "ssl.key.location": fields["ssl_key_location"],
        "ssl.key.pem": None if key is None else key.get_secret_value(),
        "ssl.key.password": secret_of(fields, "ssl_key_password"),
        "ssl.keystore.location": fields["ssl_keystore_location"],
        "ssl.keystore.password": secret_of(fields, "ssl_keystore_password"),
    }
    return {name: value for name, value in settings.items() if value is not None}


def spark_options(fields: Fields) -> dict[str, str]:
    """Return the options of Spark's Kafka source for TLS, with the secrets as plain text.

    The options contain the PEM texts, so executors on other machines need no PEM file. A PKCS#12 key store must be on
    every executor, at the same path.

    Raises:
        ConfigurationError: A file cannot be read, or the key does not have the form that Java needs (PKCS#8).
    """
    options: dict[str, str | None] = {}
    authorities = _pem(fields, "ssl_ca")
    if authorities is not None:
        options |= {"truststore.type": "PEM", "truststore.certificates": authorities}
    certificate = _pem(fields, "ssl_certificate")
    if certificate is not None:
        options |= {
            "keystore.type": "PEM",
            "keystore.certificate.chain": certificate,
            "keystore.key": _pkcs8(fields),
            "key.password": secret_of(fields, "ssl_key_password"),
        }
    if fields["ssl_keystore_location"] is not None:
        options |= {
            "keystore.type": "PKCS12",
            "keystore.location": fields["ssl_keystore_location"],
            "keystore.password": secret_of(fields, "ssl_keystore_password"),
        }
    if fields["client_settings"].get(_HOST_CHECK) == "none":
        options["endpoint.identification.algorithm"] = ""
    return {f"kafka.ssl.{name}": value for name, value in options.items() if value is not None}


def _text_of_key(fields: Fields, *, reads_files: bool) -> str:
    text = fields["ssl_key_pem"]
    if isinstance(text, SecretText):
        return text.get_secret_value()
    if not reads_files:
        return ""
    from pathlib import Path

    return Path(fields["ssl_key_location"]).read_text(encoding="utf-8", errors="replace")


def _pem(fields: Fields, name: str) -> str | None:
    """Return the PEM text of the field `name`_pem, or of the file that `name`_location names."""
    text, path = fields[f"{name}_pem"], fields[f"{name}_location"]
    if isinstance(text, SecretText):
        return text.get_secret_value()
    if text is not None or path is None:
        return None if text is None else str(text)
    field = f"{name}_location"
    pem = read_pem_file(path, field)
    if "-----BEGIN " not in pem:
        raise ConfigurationError(f"{field}: {path!r} is not a PEM file, because no line starts with -----BEGIN")
    return pem


def _pkcs8(fields: Fields) -> str | None:
    text = _pem(fields, "ssl_key")
    if text is not None and not re.search("-----BEGIN (ENCRYPTED )?PRIVATE KEY-----", text):
        path = fields["ssl_key_location"]
        where = "ssl_key_pem" if path is None else f"ssl_key_location: {path!r}"
        raise ConfigurationError(
            f"{where} is not a PKCS#8 key, the only form that Spark's Kafka client reads. Convert it with "
            "`openssl pkcs8 -topk8 -in OLD -out NEW`"
        )
    return text
