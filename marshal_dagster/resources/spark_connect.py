"""The resource for a session on a Spark Connect server, which already runs when a Dagster run starts.

Ops and assets use it through their option `spark_key`.
"""

from typing import TYPE_CHECKING, Any

from dagster import EnvVar, InitResourceContext
from pydantic import Field, PrivateAttr

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.resources.connection import CheckedResource, secret_in_code

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkConnectResource(CheckedResource):
    """A session on a Spark Connect server, for the `spark_key` of a claimed-batch op or asset.

    Without a `url` it uses a server on this machine, which listens on loopback and has its own token. The first run
    that needs the server starts it. It stays for later runs until `stop_server` stops it.

    `spark_session` raises `ConfigurationError` if the server has another version or lacks the Kafka connector, and
    `UnavailableError` if it does not answer.

    Example:
        ```python
        resources = {"spark": SparkConnectResource(url="sc://spark:15002", token=EnvVar("SPARK_TOKEN"))}
        ```
    """

    url: str | None = Field(
        default=None,
        description="URL of the server, such as sc://host:port/;use_ssl=true (default: a server on this machine).",
    )
    token: str | None = Field(
        default=None,
        repr=False,
        description='The token for the server: EnvVar("NAME") in code, {"env": "NAME"} in YAML.',
    )
    folder: str | None = Field(
        default=None,
        description="Folder for state and log of the server on this machine (default: in the user's cache).",
    )
    server_config: dict[str, str] = Field(
        default_factory=dict,
        description="Spark settings that replace or extend the defaults of the server on this machine.",
    )

    _session: Any = PrivateAttr(default=None)

    def get_resource_definition(self) -> Any:  # noqa: ANN401 - Dagster exports no name for it
        """Return Dagster's definition of this resource; reject a token in plain text."""
        token = self.__dict__["token"]  # not the model's attribute, which would read the variable
        if (token is not None and not isinstance(token, EnvVar)) or "token=" in (self.url or ""):
            raise secret_in_code("SparkConnectResource: token", "token")
        return super().get_resource_definition()

    @property
    def spark_session(self) -> "SparkSession":
        """The run's session on the server, created on first use."""
        from marshal_dagster.spark.connect_session import connect

        if self._session is None:
            url, token = self._address()
            self._session = connect(url, token=token)
        session: SparkSession = self._session
        return session

    def start_server(self) -> str:
        """Start the server on this machine, unless it is running.

        Returns:
            The URL of the server; with a `url`, that URL.

        Raises:
            ConfigurationError: A setting of the server is invalid.
        """
        return self._address()[0]

    def stop_server(self) -> bool:
        """Stop the server on this machine.

        Returns:
            Whether a server was running.

        Raises:
            ConfigurationError: This resource has a `url`, so the server is not its own.
        """
        from marshal_dagster.spark.connect_server import ConnectServer

        if self.url is not None:
            raise ConfigurationError(
                f"this resource has the url {self.url!r}, so it did not start the server: stop the server where it was "
                "started"
            )
        return ConnectServer(self.folder).stop()

    def teardown_after_execution(self, context: InitResourceContext) -> None:  # noqa: ARG002 - Dagster's
        """Disconnect from the server at the end of the step.

        Args:
            context: Dagster's context.
        """
        from marshal_dagster.spark.connect_session import disconnect

        session, self._session = self._session, None
        if session is not None:
            disconnect(session)

    def _address(self) -> tuple[str, str | None]:
        from marshal_dagster.spark.connect_server import ConnectServer

        if self.url is not None:
            token: Any = self.__dict__["token"]
            return self.url, token.get_value() if isinstance(token, EnvVar) else token
        server = ConnectServer(self.folder).start(self.server_config)
        return server.url, server.token
