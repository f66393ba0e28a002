"""Which settings a user may pass to librdkafka and to Spark's Kafka source without a field of their own.

A setting that the protocol decides is refused with the reason. So is one that has a field, and a secret in plain text.
"""

import re
from collections.abc import Mapping
from typing import Final

from marshal_dagster.kafka.authentication import GRANT_TYPE, LOGIN_HANDLER
from marshal_dagster.kafka.secret_text import is_reference

_SETTING_NAME: Final = re.compile(r"[a-z][a-z0-9._]*")
_OPTION_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9._]*")
_HOLDS_A_SECRET: Final = re.compile(
    r"password|passphrase|secret|token$|\.pem$|\.key$|credential|jaas\.config", re.IGNORECASE
)
_SECRET_IN_JAAS: Final = re.compile(r"(password|secret|token|credential|key)\w*\s*=", re.IGNORECASE)
_NOT_TEXT: Final = frozenset({"interceptors", "logger", "opaque"})

_REASONS: Final[Mapping[str, str]] = {
    "records must be on all in-sync replicas, once and in order": (
        "acks request.required.acks enable.idempotence enable.gapless.guarantee max.in.flight "
        "max.in.flight.requests.per.connection message.send.max.retries retries"
    ),
    "records of the coordination log are not written in transactions": "transactional.id transaction.timeout.ms",
    "the delivery timeout follows from the group's heartbeat interval": "message.timeout.ms delivery.timeout.ms",
    "a claim must not wait in a queue": "linger.ms queue.buffering.max.ms",
    "the library needs the log offset in every record's acknowledgement": "delivery.report.only.error",
    "a topic that is created by accident has the wrong settings": "allow.auto.create.topics",
    "members read by position and never join or commit to a Kafka consumer group": (
        "auto.offset.reset enable.auto.commit enable.auto.offset.store group.id group.instance.id group.protocol"
    ),
    "readers use it to find out where the log ends": "enable.partition.eof",
    "a corrupt record must not be processed as a valid one": "check.crcs",
    "all readers of a log must see the same records": "isolation.level",
    "it names the part of marshal-dagster that connects": "client.id",
    "the library already handles the client's log and errors": (
        "error_cb log_cb logger on_delivery stats_cb throttle_cb"
    ),
}
_NOT_FOR_SPARK: Final = "Spark does not have this setting, so claims would work and reads would fail: "
_WITHOUT_SPARK: Final[Mapping[str, str]] = {
    "ssl.engine.location": f"{_NOT_FOR_SPARK}give the certificate and its key as PEM files or as a PKCS#12 key store",
    "enable.ssl.certificate.verification": f"{_NOT_FOR_SPARK}give the authority that signed the brokers' certificates "
    "as ssl_ca_location",
}
_DECIDED_HERE: Final = {name: reason for reason, names in _REASONS.items() for name in names.split()}
_HAS_A_FIELD: Final[Mapping[str, str]] = {
    "bootstrap.servers": "bootstrap_servers",
    "metadata.broker.list": "bootstrap_servers",
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.username": "username",
    "sasl.password": "password",
    "sasl.kerberos.service.name": "kerberos_service_name",
    "sasl.kerberos.principal": "kerberos_principal",
    "sasl.kerberos.keytab": "kerberos_keytab",
    "sasl.oauthbearer.token.endpoint.url": "oauth_token_endpoint_url",
    "sasl.oauthbearer.client.id": "oauth_client_id",
    "sasl.oauthbearer.client.credentials.client.id": "oauth_client_id",
    "sasl.oauthbearer.client.secret": "oauth_client_secret",
    "sasl.oauthbearer.client.credentials.client.secret": "oauth_client_secret",
    "sasl.oauthbearer.scope": "oauth_scope",
    "sasl.oauthbearer.extensions": "oauth_extensions",
    "https.ca.location": "oauth_ca_location",
    "oauth_cb": "oauth_callback",
    "sasl.jaas.config": "the fields of the mechanism, such as username and password, because librdkafka lacks it",
    "ssl.truststore.location": "ssl_ca_location or ssl_ca_pem, because librdkafka lacks it",
    "ssl.ca.location": "ssl_ca_location",
    "ssl.ca.pem": "ssl_ca_pem",
    "ssl.certificate.location": "ssl_certificate_location",
    "ssl.certificate.pem": "ssl_certificate_pem",
    "ssl.key.location": "ssl_key_location",
    "ssl.key.pem": "ssl_key_pem",
    "ssl.key.password": "ssl_key_password",
    "ssl.keystore.location": "ssl_keystore_location",
    "ssl.keystore.password": "ssl_keystore_password",
    "compression.codec": "compression.type in client_settings",
    "socket.timeout.ms": "timeout_s",
}

_OF_ANOTHER_GRANT: Final = frozenset(
    {
        "sasl.oauthbearer.token.endpoint.url",
        "sasl.oauthbearer.client.id",
        "sasl.oauthbearer.client.credentials.client.id",
        "sasl.oauthbearer.scope",
        "sasl.oauthbearer.extensions",
        "https.ca.location",
    }
)
"""Settings with a field that is for client credentials only. With `GRANT_TYPE`, `client_settings` may contain them."""

_OF_THE_BATCH: Final = "the batch decides which offsets Spark reads, and that it reads all of them"
_SPARK_SOURCE: Final[Mapping[str, str]] = dict.fromkeys(
    (
        "assign",
        "subscribe",
        "subscribepattern",
        "startingoffsets",
        "startingoffsetsbytimestamp",
        "startingtimestamp",
        "startingoffsetsbytimestampstrategy",
        "endingoffsets",
        "endingoffsetsbytimestamp",
        "endingtimestamp",
        "failondataloss",
        "minpartitions",
        "maxrecordsperpartition",
        "maxoffsetspertrigger",
        "minoffsetspertrigger",
        "maxtriggerdelay",
        "includeheaders",
        "topic",
    ),
    _OF_THE_BATCH,
) | {"groupidprefix": _DECIDED_HERE["group.id"]}
"""Options of Spark's source that are refused, in lower case, because Spark ignores the case of options."""
_SPARK_CONSUMER: Final[Mapping[str, str]] = {
    **_DECIDED_HERE,
    "key.deserializer": "Spark reads bytes",
    "value.deserializer": "Spark reads bytes",
    "interceptor.classes": "a corrupt record must not be processed as a valid one",
}
_SPARK_FIELDS: Final[Mapping[str, str]] = {
    "bootstrap.servers": "bootstrap_servers",
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.kerberos.service.name": "kerberos_service_name",
    "sasl.oauthbearer.token.endpoint.url": "oauth_token_endpoint_url",
    "ssl.endpoint.identification.algorithm": "client_settings for ssl.endpoint.identification.algorithm, which also "
    "reaches Spark",
}
_SPARK_STORE: Final = re.compile(r"ssl\.(truststore|keystore|key)\..*")
_SPARK_OWN: Final = frozenset({"kafkaconsumer.polltimeoutms", "fetchoffset.numretries", "fetchoffset.retryintervalms"})


def client_setting_refusal(name: str, settings: Mapping[str, str]) -> str | None:
    """Return why a setting for librdkafka is refused, with what to do, or None if it is accepted.

    Args:
        name: The name of the setting.
        settings: All settings, with their values or where the values are (`env:NAME` or `file:/PATH`).

    Returns:
        The reason.
    """
    if not _SETTING_NAME.fullmatch(name):
        return "it is not the name of a librdkafka setting; those look like socket.send.buffer.bytes"
    if name in _HAS_A_FIELD and not (name in _OF_ANOTHER_GRANT and GRANT_TYPE in settings):
        return f"use {_HAS_A_FIELD[name]}"
    if name in _DECIDED_HERE:
        return f"marshal-dagster sets it, because {_DECIDED_HERE[name]}; remove it"
    if name in _WITHOUT_SPARK:
        return _WITHOUT_SPARK[name]
    if "_" in name or name in _NOT_TEXT:
        return "its value is not text, so it cannot be set here; remove it"
    if name == "default.topic.config":
        return "its value is not text: set the settings of topics directly, by their own names"
    return _plain_secret(name, settings[name])


def spark_option_refusal(name: str, options: Mapping[str, str]) -> str | None:
    """Return why an option for Spark's Kafka source is refused, with what to do, or None if it is accepted.

    Args:
        name: The name of the option; that of a setting of Kafka's Java client begins with `kafka.`.
        options: All options, with their values or where the values are (`env:NAME` or `file:/PATH`).

    Returns:
        The reason.
    """
    if not _OPTION_NAME.fullmatch(name):
        return "it is not the name of an option; those look like kafka.fetch.max.bytes"
    value, setting = options[name], name.removeprefix("kafka.")
    if setting == name:
        if name.lower() in _SPARK_SOURCE:
            return f"marshal-dagster sets it, because {_SPARK_SOURCE[name.lower()]}; remove it"
        if name.lower() in _SPARK_OWN or name.startswith("databricks."):
            return _plain_secret(name, value)
        return "options for Kafka's client begin with kafka.; add that prefix, or remove it"
    if setting in _SPARK_FIELDS and not (setting in _OF_ANOTHER_GRANT and LOGIN_HANDLER in options):
        return f"use {_SPARK_FIELDS[setting]}"
    if _SPARK_STORE.fullmatch(setting):
        return "use the fields that begin with ssl_, which reach both clients"
    if setting in _SPARK_CONSUMER:
        return f"marshal-dagster sets it, because {_SPARK_CONSUMER[setting]}; remove it"
    return _plain_secret(name, value)


def _plain_secret(name: str, value: str) -> str | None:
    if not _HOLDS_A_SECRET.search(name) or is_reference(value):
        return None
    if name.endswith("jaas.config") and not _SECRET_IN_JAAS.search(value):
        return None
    return "it would contain a secret in plain text; set it to env:NAME of an environment variable, or to file:/PATH"
