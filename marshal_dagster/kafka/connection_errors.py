"""Find out from the client library's log lines why a client has no connection to Kafka, and what to do about it.

`clients.ClientLog` keeps the most specific `FailureReason`; it becomes part of the `UnavailableError`.
"""

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Final


class FailureCause(IntEnum):
    """The cause of a failed connection. The larger of two values is the more specific cause."""

    UNKNOWN = 0
    CLOSED = 1
    SILENT = 2
    REFUSED = 3
    UNREACHABLE = 4
    NAME = 5
    PROTOCOL = 6
    CERTIFICATE = 7
    OWN_CERTIFICATE = 8
    AUTHENTICATION = 9

    @property
    def is_lasting(self) -> bool:
        """Whether a retry is useless until an operator changes something."""
        return self >= FailureCause.PROTOCOL


_ADVICE: Final = {
    FailureCause.UNKNOWN: "check bootstrap_servers, and that Kafka listens there",
    FailureCause.CLOSED: "check security_protocol: a server that requires SSL or SASL closes connections like this",
    FailureCause.SILENT: "check that Kafka listens there, and check security_protocol",
    FailureCause.REFUSED: "start Kafka there, or check bootstrap_servers",
    FailureCause.UNREACHABLE: "check bootstrap_servers, and the network between this machine and the server",
    FailureCause.NAME: "check bootstrap_servers: this machine cannot resolve the host name",
    FailureCause.PROTOCOL: "check security_protocol and sasl_mechanism: the server's listener uses other ones",
    FailureCause.CERTIFICATE: (
        "check ssl_ca_location, the host name in bootstrap_servers, and the client's certificate if the server "
        "requires one"
    ),
    FailureCause.OWN_CERTIFICATE: (
        "check ssl_certificate_location and ssl_key_location: the server requires a certificate that has not expired "
        "and is signed by an authority that the server trusts"
    ),
    FailureCause.AUTHENTICATION: "check username, password and sasl_mechanism",
}

_KNOWN: Final = (
    # The client library suspects SASL whenever a server closes a connection early, for example when it is killed.
    (
        r"Disconnected(?: while requesting ApiVersion|: verify that security\.protocol)",
        FailureCause.CLOSED,
        "the server closes the connection",
    ),
    (r"PLAINTEXT broker listener|wrong version number", FailureCause.PROTOCOL, "the server does not speak SSL there"),
    (
        r"Invalid response size",
        FailureCause.PROTOCOL,
        "the server does not speak this protocol, or is not Kafka",
    ),
    (r"not valid in current SASL state", FailureCause.PROTOCOL, "the server does not speak SASL there"),
    (r"mechanism handshake failed", FailureCause.PROTOCOL, None),
    (
        r"SSL connection closed by peer",
        FailureCause.PROTOCOL,
        "the server closes the connection during the SSL handshake",
    ),
    (
        r"alert (?:bad certificate|unknown ca|unsupported certificate|certificate \w+)",
        FailureCause.OWN_CERTIFICATE,
        "the server does not accept the certificate of this client, or this client has none",
    ),
    (
        r"certificate verify failed",
        FailureCause.CERTIFICATE,
        "certificate verify failed: the server's certificate is not trusted",
    ),
    (r"[Aa]uthentication|SASL", FailureCause.AUTHENTICATION, None),
    (r"certificate|SSL|TLS|ssl/tls", FailureCause.CERTIFICATE, None),
    (r"Failed to resolve", FailureCause.NAME, None),
    (r"ApiVersionRequest failed", FailureCause.SILENT, "the server accepts the connection and does not answer"),
    (r"refused", FailureCause.REFUSED, None),
    (r"[Tt]imed out|timeout|unreachable|No route|setup", FailureCause.UNREACHABLE, None),
    (r"[Dd]isconnected|closed by peer|reset by peer", FailureCause.CLOSED, "the server closes the connection"),
)
"""In order of precedence: a pattern of the client library's text, the cause, and a better text if there is one."""

_PREFIX: Final = re.compile(r"^(?:\[thrd:.*?\]: )?(?:(?P<server>\S+?)/(?:bootstrap|\d+): )?")
_SUFFIX: Final = re.compile(r" \(after \d+ms in state .*\)$")
_NOISE: Final = re.compile(r"error:[0-9A-F]+:[^:]*:[^:]*:")


@dataclass(frozen=True, slots=True)
class FailureReason:
    """The reason why a client has no connection to a server."""

    cause: FailureCause
    server: str
    """Host and port; empty if the log line names none."""
    text: str
    """What happened, in the text of the client library or a better one."""
    better_advice: str = ""
    """What to do, if that is known more precisely than from the cause; empty otherwise."""

    @property
    def advice(self) -> str:
        """What to do."""
        return self.better_advice or _ADVICE[self.cause]


NO_BROKERS: Final = FailureReason(
    FailureCause.UNKNOWN,
    "",
    "the server's answer lists no live broker",
    "check the brokers' logs: a broker that is starting, or that the controller has fenced, is not listed",
)
"""The cluster answered with an empty list of brokers."""


def reason_in(line: str) -> FailureReason:
    """Return the reason that a line of librdkafka's log, or the text of its error, contains."""
    prefix = _PREFIX.match(line)
    server = (prefix["server"] or "").rpartition("://")[2] if prefix else ""
    text = without_openssl_numbers(_SUFFIX.sub("", line[prefix.end() :] if prefix else line))
    for pattern, cause, words in _KNOWN:
        if re.search(pattern, text):
            return FailureReason(cause, server, words or text)
    return FailureReason(FailureCause.UNKNOWN, server, text)


def without_openssl_numbers(text: str) -> str:
    """Remove OpenSSL's error numbers from a text."""
    return _NOISE.sub("", text).strip()
