"""Dagster resources that give a Spark session which is not the run's own."""

from typing import TYPE_CHECKING, Any

from dagster import EnvVar, InitResourceContext
from pydantic import Field, PrivateAttr

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.resources.connection import CheckedResource, secret_in_code

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkConnectResource(CheckedResource):
    """A session on a Spark Connect server, which is warm already: for the `spark_key` of a claimed-batch op or asset.

    Without a `url` it is a server on this machine, on loopback and with a token of its own: the first run that needs
    it starts it, it stays for those after it, and `stop_server` ends it.

    `spark_session` raises `ConfigurationError` for a server of another version or without the Kafka connector, and
    `UnavailableError` when none answers.
    """

    url: str | None = Field(
        default=None, description="The server, as sc://host:port/;use_ssl=true; by default one on this machine."
    )
    token: str | None = Field(
        default=None,
        repr=False,
        description='The token that the server asks for: EnvVar("NAME") in code, {"env": "NAME"} in YAML.',
    )
    folder: str | None = Field(
        default=None, description="Where the server on this machine keeps its state and log; by default in the cache."
    )
    server_config: dict[str, str] = Field(
        default_factory=dict, description="Changes the Spark settings that the server on this machine is started with."
    )

    _session: Any = PrivateAttr(default=None)

    def get_resource_definition(self) -> Any:  # noqa: ANN401 - Dagster exports no name for it
        """Give what Dagster stores of this resource; refuses a token in plain text."""
        token = self.__dict__["token"]  # not read from the model, which would look up the variable
        if (token is not None and not isinstance(token, EnvVar)) or "token=" in (self.url or ""):
            raise secret_in_code("SparkConnectResource: token", "token")
        return super().get_resource_definition()

    @property
    def spark_session(self) -> "SparkSession":
        """The run's session on the server, made at the first use."""
        from marshal_dagster.spark.connect_session import connect

        if self._session is None:
            url, token = self._address()
            self._session = connect(url, token=token)
        session: SparkSession = self._session
        return session

    def start_server(self) -> str:
        """Start the server on this machine, if it does not run, and give its URL. Raises `ConfigurationError`."""
        return self._address()[0]

    def stop_server(self) -> bool:
        """Stop the server on this machine; False when there was none. Raises `ConfigurationError`."""
        from marshal_dagster.spark.connect_server import ConnectServer

        if self.url is not None:
            raise ConfigurationError("url: the server there is not this machine's own: stop it where it was started")
        return ConnectServer(self.folder).stop()

    def teardown_after_execution(self, context: InitResourceContext) -> None:  # noqa: ARG002 - Dagster's
        """Leave the server."""
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
