"""The exceptions of the Kafka for one machine (`marshal_dagster.devkafka` and `marshal-dagster kafka`).

Their docstrings have the form of marshal_dagster/errors.py, and docs/reference/errors.md is written from them, too.
"""

from marshal_dagster.errors import MarshalError


class DevKafkaError(MarshalError):
    """The Kafka for this machine cannot use its directory. Base class of the errors of `marshal_dagster.devkafka`.

    Meaning:
        No broker was started or stopped.

    Cause:
        The directory cannot be read or written, or other users may write into it.

    Action:
        Follow the message: correct the directory's rights, or name another directory.

    More:
        docs/reference/cli.md#a-kafka-for-this-machine
    """


class BrokerFailedError(DevKafkaError):
    """A broker could not be set up, ended while it started, or was not ready in time.

    Meaning:
        The cluster is not usable yet. Brokers that were started before may be running.

    Cause:
        The message has the last line of the broker's log. Common causes are too little memory or disk space, or a
        setting that the broker refuses.

    Action:
        Correct what the log line names, then start the cluster again. Give a slow machine a longer timeout.

    More:
        docs/reference/cli.md#a-kafka-for-this-machine
    """


class ClusterMismatchError(DevKafkaError):
    """The directory holds another cluster than the one that was requested, or none.

    Meaning:
        Nothing was changed.

    Cause:
        The cluster in the directory has another number of brokers or other ports, or the directory holds no cluster.

    Action:
        Use the cluster as it is, delete it with `marshal-dagster kafka down --wipe`, or name another directory.

    More:
        docs/reference/cli.md#a-kafka-for-this-machine
    """


class ClusterLockedError(DevKafkaError):
    """Another command uses the directory of the cluster.

    Meaning:
        Nothing was changed.

    Cause:
        Another process starts, stops or looks at the same cluster, and did not end within the timeout.

    Action:
        Wait until the other command ends, then try again.

    More:
        docs/reference/cli.md#a-kafka-for-this-machine
    """
