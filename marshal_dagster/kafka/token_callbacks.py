"""Functions that give librdkafka tokens for OAUTHBEARER: of Amazon MSK's signer, and of the user's own code.

librdkafka calls them in a thread of its own whenever a token is about to expire. They must not call a Kafka client.
"""

import logging
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

from marshal_dagster._internal.extras import Extra
from marshal_dagster.errors import ConfigurationError, UnavailableError

Token = tuple[str, float] | tuple[str, float, str, Mapping[str, str]]
"""A token, its expiry in unix seconds, and the principal and extensions if there are any."""

_MS: Final = 1_000
_LOG = logging.getLogger(__name__)


class TokenCallback:
    """A callback that gives a Kafka client its tokens.

    The Kafka client waits ten seconds for its first token, and reports no reason if there is none. So the first token
    is fetched before the client is created.
    """

    def __init__(self, source: str, fetch: Callable[[], Token]) -> None:
        """Create a callback.

        Args:
            source: What gives the tokens, for error messages.
            fetch: Returns a new token.
        """
        self._source = source
        self._fetch = fetch
        self._first: Token | None = None

    def fetch_first(self) -> None:
        """Fetch the token that the client gets at its creation.

        Raises:
            UnavailableError: There is no token; the message has the reason.
        """
        try:
            self._first = self._fetch()
        except Exception as error:
            raise UnavailableError(
                f"{self._source} gives no token for Kafka ({type(error).__name__}: {error}); check it, and that this "
                "process may use it"
            ) from error

    def __call__(self, _config: str) -> Token:
        """Return a token. The client calls this, also in the background before a token expires."""
        first, self._first = self._first, None
        if first is not None:
            return first
        try:
            return self._fetch()
        except Exception as error:
            _LOG.warning("%s gives no token for Kafka: %s", self._source, error)
            raise


def token_callback(path: str, extensions: Mapping[str, str]) -> TokenCallback:
    """Return the function of an import path as a callback for the Kafka client.

    Args:
        path: `package.module:function`. The function takes no argument, and returns the token and its expiry in unix
            seconds. It is called again before each expiry.
        extensions: The SASL extensions of the connection.

    Returns:
        The callback.

    Raises:
        ConfigurationError: The function cannot be imported.
    """
    function = _imported(path)

    def fetch() -> Token:
        text, expires_s = function()
        return (text, float(expires_s), "", dict(extensions)) if extensions else (text, float(expires_s))

    return TokenCallback(f"oauth_callback {path}", fetch)


def aws_msk_iam_callback(region: str, profile: str | None, role_arn: str | None) -> TokenCallback:
    """Return a callback that signs tokens for Amazon MSK with the credentials of AWS that this process has.

    Args:
        region: The AWS region of the cluster.
        profile: The profile of AWS's configuration files (default: the SDK's own order of sources).
        role_arn: The role to assume.

    Returns:
        The callback.

    Raises:
        ConfigurationError: The extra `msk` is not installed.
    """
    try:
        from aws_msk_iam_sasl_signer import MSKAuthTokenProvider as Signer
    except ImportError as error:
        raise ConfigurationError(
            f"sasl_mechanism AWS_MSK_IAM needs Amazon's signer: {Extra.MSK.command} ({error})"
        ) from None

    def sign() -> tuple[str, float]:
        if role_arn is not None:
            signed = Signer.generate_auth_token_from_role_arn(region, role_arn)
        elif profile is not None:
            signed = Signer.generate_auth_token_from_profile(region, profile)
        else:
            signed = Signer.generate_auth_token(region)
        text, expires_ms = signed
        return text, expires_ms / _MS

    def fetch() -> Token:
        try:
            return sign()
        except AttributeError as error:  # the signer's own error if the SDK finds no credentials
            raise LookupError(
                "AWS's SDK finds no credentials on this machine: give it a role, or set aws_profile"
            ) from error

    return TokenCallback("Amazon's signer", fetch)


def _imported(path: str) -> Callable[[], Any]:
    module, _, name = path.partition(":")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"oauth_callback: {path!r} cannot be imported ({error}): correct it, or install the function's package"
        ) from None
    if not callable(function):
        raise ConfigurationError(f"oauth_callback: {path!r} is not a function")
    checked: Callable[[], Any] = function
    return checked
