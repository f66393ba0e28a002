"""Functions that give librdkafka tokens for OAUTHBEARER: of Amazon MSK's signer, and of the user's own code.

librdkafka calls them in a thread of its own whenever a token is about to expire. They must not call a Kafka client.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

from marshal_dagster.errors import ConfigurationError

Token = tuple[str, float] | tuple[str, float, str, Mapping[str, str]]
"""A token, its expiry in unix seconds, and the principal and extensions if there are any."""
TokenCallback = Callable[[str], Token]

_MS: Final = 1_000


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

    def token(_config: str) -> Token:
        given = function()
        text, expires_s = given
        return (text, float(expires_s), "", dict(extensions)) if extensions else (text, float(expires_s))

    return token


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
            f"sasl_mechanism AWS_MSK_IAM needs Amazon's signer: pip install 'marshal-dagster[msk]' ({error})"
        ) from None

    def token(_config: str) -> Token:
        if role_arn is not None:
            signed = Signer.generate_auth_token_from_role_arn(region, role_arn)
        elif profile is not None:
            signed = Signer.generate_auth_token_from_profile(region, profile)
        else:
            signed = Signer.generate_auth_token(region)
        text, expires_ms = signed
        return text, expires_ms / _MS

    return token


def _imported(path: str) -> Callable[[], Any]:
    module, _, name = path.partition(":")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"oauth_callback: {path!r} cannot be imported: {error}") from None
    if not callable(function):
        raise ConfigurationError(f"oauth_callback: {path!r} is not a function")
    checked: Callable[[], Any] = function
    return checked
