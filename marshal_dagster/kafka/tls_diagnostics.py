"""Find a better explanation for a failed TLS connection, at the server and in the client's own certificate.

If a certificate is bad, Kafka's client reports only that it was not verified. If a server requires TLS, the client
reports only that the server closes the connection. So this module does one TLS handshake with the server, and sends
nothing else. A server does not report why it refuses a client's certificate, so this module checks its dates.
"""

import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.connection_errors import FailureCause, FailureReason

if TYPE_CHECKING:
    from ssl import SSLContext

_WITHIN_S: Final = 1.0
_MAY_WANT_TLS: Final = frozenset({FailureCause.CLOSED, FailureCause.SILENT})
_EXPIRED, _NOT_YET = 10, 9
_OTHER_HOST: Final = frozenset({62, 64})
"""OpenSSL's codes for faults of a certificate (`x509_vfy.h`). All other codes concern the authority that signed it."""
_HOST_IS_NOT_CHECKED: Final = "none"


def with_handshake_details(reason: FailureReason, connection: KafkaConnection) -> FailureReason:
    """Return a more specific reason, if the server or the client's certificate shows one; otherwise `reason`."""
    server = reason.server or connection.bootstrap_servers.split(",", 1)[0]
    if reason.cause is FailureCause.CERTIFICATE and connection.uses_tls:
        return _of_certificate(reason, server, connection)
    if reason.cause is FailureCause.OWN_CERTIFICATE:
        return _of_own_certificate(reason, server, connection)
    if reason.cause in _MAY_WANT_TLS and not connection.uses_tls and _speaks_tls(server):
        return FailureReason(
            FailureCause.PROTOCOL,
            server,
            "the server speaks TLS there",
            f"check security_protocol: set it to {'SASL_SSL' if connection.uses_sasl else 'SSL or SASL_SSL'}",
        )
    return reason


def _of_certificate(reason: FailureReason, server: str, connection: KafkaConnection) -> FailureReason:
    import ssl

    try:
        context = ssl.create_default_context(cafile=connection.ssl_ca_location, cadata=connection.ssl_ca_pem)
        identification = connection.client_settings.get("ssl.endpoint.identification.algorithm")
        context.check_hostname = identification != _HOST_IS_NOT_CHECKED
        _shake_hands(server, context)
    except ssl.SSLCertVerificationError as error:
        return _explained(server, error.verify_code, error.verify_message)
    except (OSError, ValueError):
        pass
    return reason


def _of_own_certificate(reason: FailureReason, server: str, connection: KafkaConnection) -> FailureReason:
    location, text = connection.ssl_certificate_location, connection.ssl_certificate_pem
    if connection.ssl_keystore_location is not None:
        return replace(
            reason, better_advice=f"check that the certificate in {connection.ssl_keystore_location} has not expired"
        )
    if location is None and text is None:
        return FailureReason(
            reason.cause,
            server,
            "the server requires a certificate of this client, which has none",
            "set ssl_certificate_location and ssl_key_location to a certificate that the server trusts, and its key",
        )
    dates = _dates(location, text)
    if dates is None:
        return reason
    (begins_s, begins), (ends_s, ends) = dates
    now_s = time.time()
    if begins_s <= now_s <= ends_s:
        return reason
    field = "ssl_certificate_pem: it needs" if location is None else f"ssl_certificate_location: {location} needs"
    dated = f"expired on {ends}" if ends_s < now_s else f"is not valid before {begins}"
    return FailureReason(
        reason.cause,
        server,
        f"the server does not accept the certificate of this client, which {dated}",
        f"check {field} a certificate that is valid now (or correct this machine's clock)",
    )


def _dates(location: str | None, text: str | None) -> tuple[tuple[float, str], tuple[float, str]] | None:
    """Return the times between which all certificates of a PEM file or text are valid, as unix seconds and as text."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cafile=location, cadata=text)
    except (OSError, ValueError):
        return None

    def moment(date: object) -> tuple[float, str]:
        return float(ssl.cert_time_to_seconds(str(date))), str(date)

    certificates = context.get_ca_certs()
    if not certificates:
        return None
    begins = max(moment(certificate["notBefore"]) for certificate in certificates)
    return begins, min(moment(certificate["notAfter"]) for certificate in certificates)


def _explained(server: str, code: int, words: str) -> FailureReason:
    host = server.rpartition(":")[0]
    if code == _EXPIRED:
        text = "the server's certificate has expired"
        advice = "install a new certificate on the server (or correct this machine's clock)"
    elif code == _NOT_YET:
        text = "the server's certificate is not valid yet"
        advice = "check this machine's clock, and the server's certificate"
    elif code in _OTHER_HOST:
        text = f"the server's certificate is not for the host {host}"
        advice = "use the host names of the certificates in bootstrap_servers and the brokers' advertised.listeners"
    else:
        text = f"certificate verify failed: no trusted authority signed the server's certificate ({words})"
        advice = "check ssl_ca_location: it must contain the authority that signed the server's certificate"
    return FailureReason(FailureCause.CERTIFICATE, server, text, advice)


def _speaks_tls(server: str) -> bool:
    import ssl

    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        _shake_hands(server, context)
    except OSError:
        return False
    return True


def _shake_hands(server: str, context: "SSLContext") -> None:
    host, _, port = server.rpartition(":")
    host = host.strip("[]")
    with (
        socket.create_connection((host, int(port)), timeout=_WITHIN_S) as plain,
        context.wrap_socket(plain, server_hostname=host),
    ):
        pass
