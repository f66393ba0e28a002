"""Why a client has no connection to Kafka, told in words from what the client library logs."""

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Final


class FailureCause(IntEnum):
    """Why there is no connection; of two that were seen, the larger one tells more."""

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
        """Tell whether trying again is useless until somebody changes something."""
        return self >= FailureCause.PROTOCOL


_ADVICE: Final = {
    FailureCause.UNKNOWN: "check bootstrap_servers, and that what listens there is Kafka",
    FailureCause.CLOSED: "check security_protocol: a server that wants SSL or SASL closes connections like this",
    FailureCause.SILENT: "check that what listens there is Kafka, and security_protocol",
    FailureCause.REFUSED: "start Kafka there, or check bootstrap_servers",
    FailureCause.UNREACHABLE: "check bootstrap_servers and the network between here and there",
    FailureCause.NAME: "check bootstrap_servers: this machine does not know the name",
    FailureCause.PROTOCOL: "check security_protocol and sasl_mechanism: the server's listener speaks another one",
    FailureCause.CERTIFICATE: (
        "check ssl_ca_location, the host name in bootstrap_servers, and the client's certificate if one is wanted"
    ),
    FailureCause.OWN_CERTIFICATE: (
        "check ssl_certificate_location and ssl_key_location: the server wants a certificate that is in date, and of "
        "an authority that it trusts"
    ),
    FailureCause.AUTHENTICATION: "check username, password and sasl_mechanism",
}

_KNOWN: Final = (
    (r"Disconnected while requesting ApiVersion", FailureCause.CLOSED, "the server closes the connection"),
    (r"PLAINTEXT broker listener|wrong version number", FailureCause.PROTOCOL, "the server does not speak SSL there"),
    (
        r"Invalid response size",
        FailureCause.PROTOCOL,
        "what answers there does not speak this protocol, or is not Kafka",
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
        "the server does not accept the certificate of this client, or its lack of one",
    ),
    (
        r"certificate verify failed",
        FailureCause.CERTIFICATE,
        "certificate verify failed: the server's is not trusted here",
    ),
    (r"[Aa]uthentication|SASL", FailureCause.AUTHENTICATION, None),
    (r"certificate|SSL|TLS|ssl/tls", FailureCause.CERTIFICATE, None),
    (r"Failed to resolve", FailureCause.NAME, None),
    (r"ApiVersionRequest failed", FailureCause.SILENT, "the server accepts the connection and does not answer"),
    (r"refused", FailureCause.REFUSED, None),
    (r"[Tt]imed out|timeout|unreachable|No route|setup", FailureCause.UNREACHABLE, None),
    (r"[Dd]isconnected|closed by peer|reset by peer", FailureCause.CLOSED, "the server closes the connection"),
)
"""In the order of asking: a pattern of the client library's words, the cause, and better words where there are any."""

_PREFIX: Final = re.compile(r"^(?:\[thrd:.*?\]: )?(?:(?P<server>\S+?)/(?:bootstrap|\d+): )?")
_SUFFIX: Final = re.compile(r" \(after \d+ms in state .*\)$")
_NOISE: Final = re.compile(r"error:[0-9A-F]+:[^:]*:[^:]*:")


@dataclass(frozen=True, slots=True)
class FailureReason:
    """Why a client has no connection to a server (empty if none was named), in the client library's words or ours.

    `better_advice` is what to do where that is known better than by the cause.
    """

    cause: FailureCause
    server: str
    text: str
    better_advice: str = ""

    @property
    def advice(self) -> str:
        """What a person can do about it."""
        return self.better_advice or _ADVICE[self.cause]


NO_BROKERS: Final = FailureReason(
    FailureCause.UNKNOWN,
    "",
    "the answer from there lists no live broker",
    "look at the brokers' logs: a broker that starts, or is fenced by the controller, is not listed",
)
"""The cluster answered, with an empty list of brokers."""


def reason_in(line: str) -> FailureReason:
    """Find the reason in a line of librdkafka's log or in the text of its error."""
    prefix = _PREFIX.match(line)
    server = (prefix["server"] or "").rpartition("://")[2] if prefix else ""
    text = without_openssl_numbers(_SUFFIX.sub("", line[prefix.end() :] if prefix else line))
    for pattern, cause, words in _KNOWN:
        if re.search(pattern, text):
            return FailureReason(cause, server, words or text)
    return FailureReason(FailureCause.UNKNOWN, server, text)


def without_openssl_numbers(text: str) -> str:
    """Take OpenSSL's error numbers out of a text."""
    return _NOISE.sub("", text).strip()
