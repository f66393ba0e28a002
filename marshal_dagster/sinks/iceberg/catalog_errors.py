"""Errors of a catalog, as this library reports them: in one line, without the secrets of the catalog's properties."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from marshal_dagster.errors import AuthorizationError, ConfigurationError, UnavailableError
from marshal_dagster.sinks.hidden_secrets import text_without

_PACKAGES: Final = ("botocore", "google", "pyiceberg", "sqlalchemy", "thrift")
_REFUSED: Final = {
    "AuthorizationExpiredError",
    "CredentialRetrievalError",
    "Forbidden",
    "ForbiddenError",
    "NoCredentialsError",
    "OAuthError",
    "PartialCredentialsError",
    "SSOError",
    "Unauthorized",
    "UnauthorizedError",
}
_REFUSED_CODES: Final = ("AccessDenied", "ExpiredToken", "InvalidClientTokenId", "UnrecognizedClient")
"""How the codes of AWS begin."""
_MISCONFIGURED: Final = {"NoRegionError", "ParamValidationError", "ProfileNotFound"}
_UNREACHED: Final = {
    "BotoCoreError",
    "ClientError",
    "GoogleAPIError",
    "InterfaceError",
    "InternalError",
    "OperationalError",
    "RESTError",
    "TException",
    "TimeoutError",
}


@contextmanager
def known_errors(output: str, secrets: Callable[[], Iterable[str]]) -> Iterator[None]:
    """Convert errors of a catalog that is not configured, not reached or not allowed.

    Args:
        output: The name of the table, for errors.
        secrets: Returns texts that must not be in an error.

    Raises:
        ConfigurationError: The catalog is not known, or a property or package is missing.
        AuthorizationError: The catalog has refused the credentials.
        UnavailableError: The catalog cannot be reached.
    """
    try:
        yield
    except Exception as error:
        kind = _kind(error)
        if kind is None:
            raise
        text = text_without(secrets(), error)
        if kind is ConfigurationError:
            raise ConfigurationError(
                f"{output}: its catalog cannot be opened ({text}). Correct its configuration, or the sink's "
                "catalog_properties"
            ) from None
        if kind is AuthorizationError:
            raise _refused(output, text) from None
        raise UnavailableError(
            f"{output}: the catalog or its storage cannot be reached ({text}). Run the batch again once it can be"
        ) from None


def commit_error(output: str, secrets: Iterable[str], error: Exception) -> Exception:
    """Return the error to raise for a commit that is not in the table.

    Args:
        output: The name of the table, for errors.
        secrets: Texts that must not be in an error.
        error: The catalog's error.

    Returns:
        `AuthorizationError` or `UnavailableError`; the same error if it is none of a catalog.
    """
    kind = _kind(error)
    if kind is None:
        return error
    text = text_without(secrets, error)
    if kind is AuthorizationError:
        return _refused(output, text)
    return UnavailableError(
        f"{output}: the catalog did not confirm the commit ({text}). Run the batch again: it writes what the table "
        "does not have"
    )


def configured_properties(catalog: str | None) -> Mapping[str, Any]:
    """Return the properties of a catalog in pyiceberg's configuration; none if it has no such catalog.

    Args:
        catalog: The name of the catalog; pyiceberg's default if None.
    """
    from pyiceberg.utils.config import Config

    with contextlib.suppress(Exception):
        config = Config()
        return config.get_catalog_config(catalog or config.get_default_catalog_name()) or {}
    return {}


def _kind(error: Exception) -> type[Exception] | None:
    """Return the class that an error of a catalog is converted to; None if it is another error."""
    bases = type(error).__mro__
    names = {base.__name__ for base in bases if base.__module__.partition(".")[0] in _PACKAGES}
    if names & _REFUSED or _code(error).startswith(_REFUSED_CODES):
        return AuthorizationError
    if names & _MISCONFIGURED:
        return ConfigurationError
    if names & _UNREACHED or isinstance(error, OSError):
        return UnavailableError
    return ConfigurationError if names or isinstance(error, (ValueError, ModuleNotFoundError)) else None


def _code(error: Exception) -> str:
    """Return the code of an error of AWS, else an empty text."""
    response = getattr(error, "response", None)
    details = response.get("Error") if isinstance(response, dict) else None
    return str(details.get("Code")) if isinstance(details, dict) else ""


def _refused(output: str, text: str) -> AuthorizationError:
    return AuthorizationError(
        f"{output}: the catalog has refused access ({text}). Correct its credentials, or grant the right to read and "
        "to change the table"
    )
