"""Errors of a catalog, as this library reports them: in one line, without the values of the catalog's properties."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from marshal_dagster.errors import AuthorizationError, ConfigurationError, UnavailableError


@contextmanager
def known_errors(output: str, secrets: Iterable[str]) -> Iterator[None]:
    """Convert errors of a catalog that is not configured, not reached or not allowed.

    Args:
        output: The name of the table, for errors.
        secrets: Texts that must not be in an error.

    Raises:
        ConfigurationError: The catalog is not known, or a property or package is missing.
        AuthorizationError: The catalog has refused the credentials.
        UnavailableError: The catalog cannot be reached.
    """
    from pyiceberg.exceptions import ForbiddenError, NotInstalledError, OAuthError, RESTError, UnauthorizedError
    from sqlalchemy.exc import OperationalError

    try:
        yield
    except (ValueError, NotInstalledError, ModuleNotFoundError) as error:
        raise ConfigurationError(
            f"{output}: its catalog cannot be opened ({_without(secrets, error)}). Correct its configuration, or "
            "the sink's catalog_properties"
        ) from None
    except (UnauthorizedError, ForbiddenError, OAuthError) as error:
        raise AuthorizationError(
            f"{output}: the catalog has refused access ({_without(secrets, error)}). Correct its credentials, or grant "
            "the right to read and to change the table"
        ) from None
    except (OSError, RESTError, OperationalError) as error:
        raise UnavailableError(
            f"{output}: the catalog or its storage cannot be reached ({_without(secrets, error)}). Run the batch again "
            "when it is"
        ) from None


def _without(secrets: Iterable[str], error: Exception) -> str:
    """Return the first line of an error's text without secrets."""
    text = next(iter(str(error).splitlines()), type(error).__name__)
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***") if secret else text
    return text
