"""Why a client has no connection to Kafka, told in words from what the client library logs."""

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Final


class Cause(IntEnum):
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
        return self >= Cause.PROTOCOL


_ADVICE: Final = {
    Cause.UNKNOWN: "check bootstrap_servers, and that what listens there is Kafka",
    Cause.CLOSED: "check security_protocol: a server that wants SSL or SASL closes connections like this",
    Cause.SILENT: "check that what listens there is Kafka, and security_protocol",
    Cause.REFUSED: "start Kafka there, or check bootstrap_servers",
    Cause.UNREACHABLE: "check bootstrap_servers and the network between here and there",
    Cause.NAME: "check bootstrap_servers: this machine does not know the name",
    Cause.PROTOCOL: "check security_protocol and sasl_mechanism: the server's listener speaks another one",
    Cause.CERTIFICATE: (
        "check ssl_ca_location, the host name in bootstrap_servers, and the client's certificate if one is wanted"
    ),
    Cause.OWN_CERTIFICATE: (
        "check ssl_certificate_location and ssl_key_location: the server wants a certificate that is in date, and of "
        "an authority that it trusts"
    ),
    Cause.AUTHENTICATION: "check username, password and sasl_mechanism",
}

_KNOWN: Final = (
    (r"Disconnected while requesting ApiVersion", Cause.CLOSED, "the server closes the connection"),
    (r"PLAINTEXT broker listener|wrong version number", Cause.PROTOCOL, "the server does not speak SSL there"),
    (r"Invalid response size", Cause.PROTOCOL, "what answers there does not speak this protocol, or is not Kafka"),
    (r"not valid in current SASL state", Cause.PROTOCOL, "the server does not speak SASL there"),
    (r"mechanism handshake failed", Cause.PROTOCOL, None),
    (r"SSL connection closed by peer", Cause.PROTOCOL, "the server closes the connection during the SSL handshake"),
    (
        r"alert (?:bad certificate|unknown ca|unsupported certificate|certificate \w+)",
        Cause.OWN_CERTIFICATE,
        "the server does not accept the certificate of this client, or its lack of one",
    ),
    (r"certificate verify failed", Cause.CERTIFICATE, "certificate verify failed: the server's is not trusted here"),
    (r"[Aa]uthentication|SASL", Cause.AUTHENTICATION, None),
    (r"certificate|SSL|TLS|ssl/tls", Cause.CERTIFICATE, None),
    (r"Failed to resolve", Cause.NAME, None),
    (r"ApiVersionRequest failed", Cause.SILENT, "the server accepts the connection and does not answer"),
    (r"refused", Cause.REFUSED, None),
    (r"[Tt]imed out|timeout|unreachable|No route|setup", Cause.UNREACHABLE, None),
    (r"[Dd]isconnected|closed by peer|reset by peer", Cause.CLOSED, "the server closes the connection"),
)
"""In the order of asking: a pattern of the client library's words, the cause, and better words where there are any."""

_PREFIX: Final = re.compile(r"^(?:\[thrd:.*?\]: )?(?:(?P<server>\S+?)/(?:bootstrap|\d+): )?")
_SUFFIX: Final = re.compile(r" \(after \d+ms in state .*\)$")
_NOISE: Final = re.compile(r"error:[0-9A-F]+:[^:]*:[^:]*:")


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a client has no connection to a server (empty if none was named), in the client library's words or ours.

    `better_advice` is what to do where that is known better than by the cause.
    """

    cause: Cause
    server: str
    text: str
    better_advice: str = ""

    @property
    def advice(self) -> str:
        """What a person can do about it."""
        return self.better_advice or _ADVICE[self.cause]


def reason_in(line: str) -> Reason:
    """Find the reason in a line of librdkafka's log or in the text of its error."""
    prefix = _PREFIX.match(line)
    server = (prefix["server"] or "").rpartition("://")[2] if prefix else ""
    text = without_noise(_SUFFIX.sub("", line[prefix.end() :] if prefix else line))
    for pattern, cause, words in _KNOWN:
        if re.search(pattern, text):
            return Reason(cause, server, words or text)
    return Reason(Cause.UNKNOWN, server, text)


def without_noise(text: str) -> str:
    """Take OpenSSL's error numbers out of a text."""
    return _NOISE.sub("", text).strip()
