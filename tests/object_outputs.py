"""Outputs in object stores for tests of the file sink, written without Spark and read without the sink's client."""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import SecretStr

from marshal_dagster.sinks.files.object_storage import ObjectStorage
from tests.object_store_server import BUCKET, Objects
from tests.sink_outputs import FILE_STEPS, FakeFileSink, FileOutput, counting, hook

FOLDER = "shop/a b%20[1],c"
SECRET = "kept-out-of-every-text"
AZURE_KEY = base64.b64encode(SECRET.encode()).decode()


class S3Keys(Mapping[str, bytes]):
    """The objects of a bucket of a real server, read with Amazon's client."""

    def __init__(self, url: str) -> None:
        import boto3

        named = {"aws_access_key_id": "writer", "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
        self._client = boto3.client("s3", endpoint_url=url, **named)

    def __getitem__(self, key: str) -> bytes:
        content: bytes = self._client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return content

    def __iter__(self) -> Iterator[str]:
        for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
            yield from (item["Key"] for item in page.get("Contents", ()))

    def __len__(self) -> int:
        return len(list(iter(self)))


class S3Objects:
    """A real server, as `ObjectOutput` needs it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.content = S3Keys(url)


class ObjectSink(FakeFileSink):
    """A sink whose replacement for Spark also writes to the store."""

    @property
    def store(self) -> ObjectStorage:
        """The storage of the sink."""
        assert isinstance(self._storage, ObjectStorage)
        return self._storage

    def _put(self, name: str, text: str) -> None:
        if not name.endswith(".crc"):
            self._storage.write_whole(name, text.encode())


class ObjectOutput(FileOutput):
    """A folder in the store, which is read without the sink's client."""

    steps: ClassVar[Sequence[str]] = [step for step in FILE_STEPS if step != "file moved"]

    def __init__(self, objects: Any, uri: str = f"s3://{BUCKET}/{FOLDER}") -> None:  # noqa: ANN401 - of either store
        self.objects, self.uri = objects, uri
        self.folder = uri.split("/", 3)[3]

    def sink(self, reached: Callable[[str], None] | None = None) -> ObjectSink:
        """Return a sink as another process would have it."""
        sink = ObjectSink(self.uri, storage_options=options_of(self.objects, self.uri))
        hook(sink, reached)
        return sink

    def counted(self) -> list[Any]:
        """Return the committed objects."""
        commits = sorted(key for key in self.objects.content if key.startswith(f"{self.folder}/_marshal/commits/"))
        return list(counting([self.objects.content[key].decode() for key in commits]))

    def content(self, place: Any) -> str:  # noqa: ANN401 - a name here
        """Return the text of an object."""
        content: bytes = self.objects.content[f"{self.folder}/_marshal/{place}"]
        return content.decode()

    def left(self) -> set[str]:
        """Return the attempts of which something is left."""
        start = f"{self.folder}/_marshal/attempts/"
        names = {key.removeprefix(start) for key in self.objects.content if key.startswith(start)}
        return {name.partition("/")[0].removesuffix(".json") for name in names}


def options_of(objects: "Objects | S3Objects", uri: str) -> dict[str, Any]:
    """Return the options with which a client reaches the store under the scheme of this URI."""
    if uri.startswith("gs:"):
        return {"base_url": objects.url, "bearer_token": SecretStr(SECRET)}
    if uri.startswith("abfs"):
        return {"endpoint": objects.url, "account_key": SecretStr(AZURE_KEY)}
    return {"endpoint": objects.url, "access_key_id": "writer", "secret_access_key": SecretStr(SECRET)}
