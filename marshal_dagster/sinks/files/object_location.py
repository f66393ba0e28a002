"""The URI of an output in an object store, and the settings with which a client reaches it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.kafka.secret_text import dereferenced
from marshal_dagster.sinks.hidden_secrets import secret_values, without_user

if TYPE_CHECKING:
    from obstore.store import ObjectStore


class Secret(Protocol):
    """A string that is not shown when printed, such as pydantic's `SecretStr`."""

    def get_secret_value(self) -> str:
        """Return the string."""
        ...


StoreOptions = Mapping[str, "str | Secret"]
"""Settings of a store's client by their names in obstore, such as `endpoint` and `region`."""

_S3, _GCS, _AZURE = "s3", "gs", "az"
_KINDS: Final[Mapping[str, str]] = {"s3": _S3, "s3a": _S3, "gs": _GCS, "abfs": _AZURE, "abfss": _AZURE}
SCHEMES: Final = frozenset(_KINDS)
"""The schemes of URIs of object stores."""
_OWN: Final = frozenset(
    {"account_name", "bucket", "bucket_name", "conditional_put", "container_name", "copy_if_not_exists"}
    | {"storage_account_name"}
)
_CLIENT: Final = frozenset(
    {"allow_http", "connect_timeout", "proxy_ca_certificate", "proxy_excludes", "proxy_url", "root_certificate"}
    | {"timeout"}
)
"""Options of the HTTP client, whatever the store is."""
_ENDPOINTS: Final = (
    "endpoint",
    "endpoint_url",
    "aws_endpoint",
    "aws_endpoint_url",
    "aws_endpoint_url_s3",
    "base_url",
    "azure_endpoint",
    "azure_storage_endpoint",
    "google_base_url",
)
_DEFAULTS: Final = {"connect_timeout": "5s", "timeout": "30s"}
_RETRIES: Final = 5
_AZURE_HOST: Final = re.compile(r"(?P<account>[a-z0-9]+)\.dfs\.(?P<cloud>.+)")
_PUBLIC_CLOUD: Final = "core.windows.net"


@dataclass(frozen=True, slots=True)
class ObjectLocation:
    """The parts of the URI of an output.

    Example:
        ```python
        ObjectLocation.parse("abfss://data@shop.dfs.core.windows.net/orders")  # bucket "data", prefix "orders"
        ```
    """

    scheme: str
    """The scheme of the URI, such as `s3a`."""
    bucket: str
    """The bucket; of Azure, the container."""
    prefix: str
    """What the names of all objects of the output begin with, without a slash at its end."""
    host: str = ""
    """The host of Azure's account."""

    @classmethod
    def parse(cls, uri: str) -> "ObjectLocation":
        """Return the parts of a URI with one of `SCHEMES`.

        Args:
            uri: The URI, in which no character is escaped.

        Returns:
            The parts.

        Raises:
            ConfigurationError: The URI has no bucket, or is not of a store's form.
        """
        scheme, _, rest = uri.partition(":")
        authority, _, prefix = rest.removeprefix("//").partition("/")
        bucket, _, host = authority.partition("@")
        is_azure = _KINDS[scheme] == _AZURE
        if not bucket or ":" in bucket or is_azure != bool(host):
            form = f"{scheme}://container@account.dfs.{_PUBLIC_CLOUD}/path" if is_azure else f"{scheme}://bucket/path"
            # A secret key can have a slash, so all after a colon can be secret.
            shown = f"{scheme}://***" if ":" in authority else without_user(uri)
            raise ConfigurationError(f"path is {shown!r}; it must be of the form {form}")
        if any(part in {"", ".", ".."} for part in prefix.split("/")) and prefix:
            raise ConfigurationError(f"path is {uri!r}; the parts of its path must not be empty, '.' or '..'")
        if is_azure and not _AZURE_HOST.fullmatch(host):
            raise ConfigurationError(f"path is {uri!r}; its host must be of the form account.dfs.{_PUBLIC_CLOUD}")
        return cls(scheme, bucket, prefix, host)

    @property
    def usual_scheme(self) -> str:
        """The scheme with which Spark's connector for the store is registered."""
        return "s3a" if self.scheme == "s3" else self.scheme

    @staticmethod
    def checked_options(options: StoreOptions) -> dict[str, "str | Secret"]:
        """Return the options with names in lower case.

        Args:
            options: The options as the user has given them.

        Returns:
            The options.

        Raises:
            ConfigurationError: The sink sets an option itself, or a value is not a text.
        """
        checked = {name.lower(): value for name, value in options.items()}
        for name, value in checked.items():
            if name.removeprefix("aws_").removeprefix("azure_").removeprefix("google_") in _OWN:
                raise ConfigurationError(f"storage_options has {name!r}, which the sink sets itself: leave it out")
            if not isinstance(value, str) and not hasattr(value, "get_secret_value"):
                raise ConfigurationError(
                    f"storage_options has {name!r} with a {type(value).__name__}; it must be a text or a SecretStr"
                )
        return checked

    def resolved(self, options: StoreOptions) -> "OpenOptions":
        """Return the options in plain text, with the values of the variables and files that they name.

        Args:
            options: Options that were checked.

        Returns:
            The options with which the store is opened.

        Raises:
            ConfigurationError: A variable is not set, or a file cannot be read.
        """
        texts = {name: value if isinstance(value, str) else value.get_secret_value() for name, value in options.items()}
        return OpenOptions(self, dereferenced(texts, "storage_options"))


@dataclass(frozen=True, slots=True, repr=False)
class OpenOptions:
    """The options of a client in plain text; their `repr` does not show them."""

    location: ObjectLocation
    texts: Mapping[str, str]

    def secrets(self) -> list[str]:
        """Return the texts that errors must not show."""
        return secret_values(self.texts)

    def open(self, *, retries: bool) -> "ObjectStore":
        """Return a client.

        Args:
            retries: Whether it repeats requests that have failed.
        """
        from obstore.store import AzureStore, GCSStore, S3Store

        of_client = {name: text for name, text in self.texts.items() if name in _CLIENT}
        config: Any = {name: text for name, text in self.texts.items() if name not in _CLIENT}
        if any(config.get(name, "").startswith("http://") for name in _ENDPOINTS):
            of_client.setdefault("allow_http", "true")
        settings: dict[str, Any] = {
            "client_options": _DEFAULTS | of_client,
            "retry_config": {"max_retries": _RETRIES if retries else 0, "retry_timeout": timedelta(minutes=1)},
        }
        bucket = self.location.bucket
        kind = _KINDS[self.location.scheme]
        if kind == _S3:
            return S3Store(bucket, config=config | {"conditional_put": "etag"}, **settings)
        if kind == _GCS:
            return GCSStore(bucket, config=config, **settings)
        return AzureStore(bucket, config=self._of_account() | config, **settings)

    def _of_account(self) -> dict[str, str]:
        found = _AZURE_HOST.fullmatch(self.location.host)
        assert found is not None  # noqa: S101 - `ObjectLocation.parse` has checked it
        account, cloud = found["account"], found["cloud"]
        other = {} if cloud == _PUBLIC_CLOUD else {"endpoint": f"https://{account}.blob.{cloud}"}
        return {"account_name": account} | other
