"""Running of a claimed asset, op or job against topics in memory, with simulated crashes."""

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from dagster import (
    AssetsDefinition,
    AssetSelection,
    BetaWarning,
    DagsterInstance,
    DagsterRun,
    Definitions,
    ExecuteInProcessResult,
    GraphDefinition,
    JobDefinition,
    ResourceDefinition,
    RunConfig,
    define_asset_job,
    in_process_executor,
)

from marshal_dagster.batches import ClaimedBatch
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.ops.claimed_batch import ClaimedBatchOp
from marshal_dagster.ops.config import BatchSpec, ClaimedBatchConfig, WorkOptions
from marshal_dagster.ops.user_function import require_no_rows, require_rows
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.resources.claimer import ClaimerResource
from marshal_dagster.runs.status import FINISHED
from marshal_dagster.sinks import Sink
from marshal_dagster.testing.crashes import (
    CrashPoint,
    MortalProcess,
    MortalSink,
    SimulatedCrash,
    mortal_function,
    running,
)
from marshal_dagster.testing.memory_kafka import MemoryKafka
from marshal_dagster.testing.memory_reader import FrameKind, frame_kind, frame_of
from marshal_dagster.testing.memory_resources import in_memory, memory_claimer, resource_in_job, value_of
from marshal_dagster.testing.memory_sink import MemorySink, Row
from marshal_dagster.testing.memory_topics import AnyRecord, MemoryRecord
from marshal_dagster.testing.spark import SparkInMemory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Claimed = AssetsDefinition | ClaimedBatchOp | JobDefinition
"""What `run_in_memory` runs: an asset of `marshal_asset`, an op of `build_claimed_batch_op`, or a job of these."""

_SPARK_KEY: Final = "spark_in_memory"
_GROUP: Final = "in-memory"
_LIBRARY_SINKS: Final = "marshal_dagster.sinks."
"""The package of the library's sinks, all of which need frames of Spark."""


@dataclass(slots=True)
class MemoryAttempt:
    """One run."""

    run_id: str = ""
    """Dagster's id of the run."""
    is_crashed: bool = False
    """Whether the run's simulated process has died."""
    crashed_at: CrashPoint | None = None
    """The crash point at which it died; None if it did not die, or died by `crash`."""
    result: ExecuteInProcessResult | None = None
    """Dagster's result of the run, None if its process died."""
    run: DagsterRun | None = None
    """Dagster's record of the run, with its status and tags."""
    ranges: list[ClaimedRange] = field(default_factory=list)
    """The ranges with which the function was called."""
    records: list[MemoryRecord] = field(default_factory=list)
    """The records of these ranges."""

    @property
    def success(self) -> bool:
        """Whether the run has succeeded."""
        return self.result is not None and self.result.success


@dataclass(frozen=True, slots=True)
class MemoryResult:
    """What `run_in_memory` returns: the outcome of all attempts.

    Example:
        ```python
        result = run_in_memory(orders_per_shop, {"orders": ["north", "south"]})
        assert result.positions == {"orders": {0: 2}}
        ```
    """

    kafka: MemoryKafka
    """The cluster in memory, for a later run."""
    group: str
    """The consumer group."""
    attempts: Sequence[MemoryAttempt]
    """The runs, in their order."""
    sinks: Mapping[str, Sink]
    """The sink of each op with one, by the name of the op."""

    @property
    def rows(self) -> list[Row]:
        """The rows in the sinks in memory: by sink, partition and offset."""
        sinks = {id(sink): sink for sink in self.sinks.values() if isinstance(sink, MemorySink)}  # ops may share one
        return [row for sink in sinks.values() for row in sink.rows()]

    def rows_of(self, op: str) -> list[Row]:
        """Return the rows in the sink of an op of a job with several.

        Args:
            op: The name of the op, or its alias in the job. Aliases of one op share a sink.

        Returns:
            The rows; none if the op has a sink of your own or no sink.
        """
        sink = self.sinks.get(op)
        return sink.rows() if isinstance(sink, MemorySink) else []

    @property
    def ranges(self) -> list[ClaimedRange]:
        """The ranges with which the function was called, in all attempts."""
        return [range_ for attempt in self.attempts for range_ in attempt.ranges]

    @property
    def records(self) -> list[MemoryRecord]:
        """The records with which the function was called, in all attempts; those that were repeated are in it twice."""
        return [record for attempt in self.attempts for record in attempt.records]

    @property
    def repeated(self) -> list[MemoryRecord]:
        """The records with which the function was called more than once."""
        counts = Counter(self.records)
        return [record for record, count in counts.items() if count > 1]

    @property
    def positions(self) -> dict[str, dict[int, int]]:
        """The group's committed positions: for each topic the next offset to process, by partition."""
        return self.kafka.positions(self.group)

    @property
    def kafka_offsets(self) -> dict[str, dict[int, int]]:
        """The offsets that the runs committed to Kafka for lag tools, by topic and partition."""
        return {
            topic: dict(sorted(at.items())) for topic, at in self.kafka.topics.committed.get(self.group, {}).items()
        }


def run_in_memory(
    claimed: Claimed,
    records: Mapping[str, Iterable[AnyRecord]] | None = None,
    *,
    crash_at: CrashPoint | str | Sequence[CrashPoint | str] | None = None,
    attempts: int | None = None,
    partitions: int = 1,
    kafka: MemoryKafka | None = None,
    sink: Sink | None = None,
    resources: Mapping[str, object] | None = None,
    config: ClaimedBatchConfig | None = None,
    partition_key: str | None = None,
    spark: "SparkSession | None" = None,
    instance: DagsterInstance | None = None,
    raise_on_error: bool = True,
) -> MemoryResult:
    """Run a claimed asset, op or job against topics in memory, without Kafka.

    Claims, plans, sinks' verdicts and commits are those of production; only Kafka is replaced. Each attempt is a run of
    Dagster with its own simulated process. A process that dies at a crash point sends nothing more, as after SIGKILL,
    and Dagster records its run as failed. The next attempt takes its claims over.

    In effectively once the sink is replaced by a `MemorySink`, whose rows are in the result.

    The function gets a DataFrame of Spark, as in production. Spark is not started if the third argument of the function
    is annotated as `DataFrame | list[dict]` or `DataFrame | pandas.DataFrame` and the test passes no session: then it
    gets a list of dicts or a frame of pandas. It may return the same kind of rows. A function with `with_frame=False`
    reads its batch itself, for example with `kafka.topics.read(batch.ranges)` in a test double.

    Args:
        claimed: The asset, the op, or a job of these, such as `defs.resolve_job_def("orders_job")`. Ops must be at the
            top level of the job. Its asset checks are not run.
        records: The records of each topic, in the forms of `MemoryTopics.append`.
        crash_at: The crash point of the first attempt, or one for each of the first attempts.
        attempts: The number of runs (default: one more than there are crash points).
        partitions: The number of partitions of each topic that is created.
        kafka: The cluster in memory (default: a new one). Pass it to a later call to continue.
        sink: The sink, instead of a `MemorySink`; pass it to a later call to continue.
        resources: The resources that the function uses. A `ClaimerResource` among them sets group and delivery mode,
            and is then replaced. Without one the mode is effectively once with a sink, otherwise at least once.
        config: The run config of the op or asset (default: that of the job).
        partition_key: The Dagster partition, for an asset with `per_partition`.
        spark: The Spark session (default: the active one of the process, or a local one that the first batch starts).
        instance: The Dagster instance (default: an ephemeral one).
        raise_on_error: Whether to raise the error of a run that fails without a simulated crash.

    Returns:
        Rows, ranges, positions and attempts.

    Raises:
        ConfigurationError: An argument is invalid, or a crash point was not reached.
        Exception: The error with which a run failed, if `raise_on_error` is set.

    Example:
        ```python
        def test_a_crash_loses_and_repeats_nothing():
            records = {"orders": ["north", "south", "north"]}
            result = run_in_memory(orders_per_shop, records, crash_at="after_write")
            assert [row["shop"] for row in result.rows] == ["north", "south", "north"]
            assert result.positions == {"orders": {0: 3}}
        ```
    """
    crashes = _crash_points(crash_at, attempts)
    kafka = kafka or MemoryKafka()
    kafka.append(records or {}, partitions=partitions)
    work = _Work(
        claimed=claimed,
        kafka=kafka,
        sink=sink,
        resources=dict(resources or {}),
        config=config,
        partition_key=partition_key,
        spark=spark,
    )
    group = work.group()
    with nullcontext(instance) if instance else DagsterInstance.ephemeral() as dagster:
        done = [work.attempt(dagster, point, raise_on_error=raise_on_error) for point in crashes]
    return MemoryResult(kafka, group, done, work.sinks_by_node())


def _crash_points(
    crash_at: CrashPoint | str | Sequence[CrashPoint | str] | None, attempts: int | None
) -> list[CrashPoint | None]:
    """Return the crash point of each attempt."""
    given = [crash_at] if isinstance(crash_at, str) else list(crash_at or ())
    unknown = [point for point in given if point not in set(CrashPoint)]
    if unknown:
        raise ConfigurationError(f"crash_at is {unknown[0]!r}; the crash points are {', '.join(CrashPoint)}")
    wanted = len(given) + 1 if attempts is None else attempts
    if wanted < max(1, len(given)):
        raise ConfigurationError(
            f"attempts is {wanted}; it must be at least 1, and at least the number of crash points ({len(given)})"
        )
    return [*map(CrashPoint, given), *[None] * (wanted - len(given))]


@dataclass(slots=True, kw_only=True)
class _Work:
    """The work of all attempts."""

    claimed: Claimed
    kafka: MemoryKafka
    sink: Sink | None
    resources: dict[str, object]
    config: ClaimedBatchConfig | None
    partition_key: str | None
    spark: "SparkSession | None"
    sinks: dict[str, Sink] = field(default_factory=dict)
    ops: list[ClaimedBatchOp] = field(init=False)

    def __post_init__(self) -> None:
        self.ops = _ops_of(self.claimed)
        given, self.resources = self.resources, {**_resources_of_job(self.claimed), **self.resources}
        self._require_topics()
        self._require_claimers(given)
        self._require_partition()
        self._require_sink()
        for op in self.ops:
            self.resources.setdefault(op.spec.claimer_key, memory_claimer(_GROUP, _delivery_of(op.spec)))

    def attempt(self, instance: DagsterInstance, crash_at: CrashPoint | None, *, raise_on_error: bool) -> MemoryAttempt:
        """Run once, in a simulated process of its own."""
        process, made = MortalProcess(crash_at), MemoryAttempt()
        before = set(instance.get_run_ids())
        try:
            with running(process):
                made.result = self._execute(process, made, instance, raise_on_error=raise_on_error)
        except SimulatedCrash:
            made.is_crashed = True
        made.run_id = next(iter(set(instance.get_run_ids()) - before), "")
        if process.is_dead:
            made.is_crashed, made.result, made.crashed_at = True, None, crash_at
            _record_as_failed(instance, made.run_id)
        elif crash_at is not None:
            raise ConfigurationError(
                f"the crash point {crash_at} was not reached: the run ended before it, or batches of this delivery "
                "mode do not have it"
            )
        made.run = instance.get_run_by_id(made.run_id)
        return made

    def _execute(
        self, process: MortalProcess, made: MemoryAttempt, instance: DagsterInstance, *, raise_on_error: bool
    ) -> ExecuteInProcessResult:
        replaced = {op: self._replaced(op, process, made) for op in self.ops}
        run_config = self._run_config()
        resources = self._in_memory(process)
        assets = _assets_of(self.claimed)
        if assets:
            self._add_partition(instance)
            asset_job = _job_of_assets(
                self.claimed, [_with_replaced_op(asset, replaced) for asset in assets], resources
            )
            return asset_job.execute_in_process(
                instance=instance,
                run_config=run_config,
                partition_key=self.partition_key,
                raise_on_error=raise_on_error,
            )
        job = _job_of(self.claimed, replaced, resources)
        return job.execute_in_process(run_config=run_config, instance=instance, raise_on_error=raise_on_error)

    def _run_config(self) -> RunConfig | Mapping[str, Any] | None:
        if self.config is not None:
            return RunConfig(ops=dict.fromkeys(self._nodes(), self.config))
        return self.claimed.run_config if isinstance(self.claimed, JobDefinition) else None

    def _nodes(self) -> list[str]:
        """Return the names of the ops in their job, which may have aliases."""
        if not isinstance(self.claimed, JobDefinition) or _assets_of(self.claimed):
            return [op.name for op in self.ops]
        return [node.name for node in self.claimed.graph.nodes if node.definition in self.ops]

    def sinks_by_node(self) -> dict[str, Sink]:
        """Return the sinks by the names of their ops, and by the aliases that these have in the job."""
        nodes = self.claimed.graph.nodes if isinstance(self.claimed, JobDefinition) else []
        named = {node.name: self.sinks.get(node.definition.name) for node in nodes}
        return self.sinks | {name: sink for name, sink in named.items() if sink is not None}

    # What is replaced in a run

    def _replaced(self, op: ClaimedBatchOp, process: MortalProcess, made: MemoryAttempt) -> ClaimedBatchOp:
        """Return the op with a function and a sink that die with the process."""
        rebuilt = self._rebuilt(op, process, made)
        return rebuilt.op if isinstance(rebuilt, AssetsDefinition) else rebuilt  # type: ignore[return-value] # its op is one

    def _rebuilt(self, op: ClaimedBatchOp, process: MortalProcess, made: MemoryAttempt) -> Any:  # noqa: ANN401 - an op or asset
        changes: WorkOptions = {}
        if op.spec.sink is not None:
            kept = self.sinks.setdefault(op.name, MemorySink(op.name) if self.sink is None else self.sink)
            changes["sink"] = MortalSink(kept, process)
        function, kind = self._recorded(op.fn, made), self._kind(op)
        if kind is not FrameKind.SPARK:
            process_rows = self._with_rows(op, function, kind, process)
            changes |= {"with_frame": False, "count_records": False, "min_partitions": None}
            return op.rebuild(process_rows, {**changes, "spark_key": None, "spark_config": None})
        if op.spec.with_frame:
            changes |= {"spark_key": _SPARK_KEY, "spark_config": None}
            return op.rebuild(mortal_function(function, process), changes)
        return op.rebuild(_claimed_first(mortal_function(function, process), process), changes)

    def _kind(self, op: ClaimedBatchOp) -> FrameKind:
        """Return the kind of frame that the function of an op gets."""
        return frame_kind(op.fn) if op.spec.with_frame and self.spark is None else FrameKind.SPARK

    def _recorded(self, function: Callable[..., Any], made: MemoryAttempt) -> Callable[..., Any]:
        """Return the function, which also notes with which ranges it is called."""

        @functools.wraps(function)
        def noted(context: Any, batch: ClaimedBatch, *frame: Any) -> Any:  # noqa: ANN401 - the user's
            made.ranges.extend(batch.ranges)
            made.records.extend(self.kafka.topics.read(batch.ranges))
            return function(context, batch, *frame)

        return noted

    def _with_rows(
        self, op: ClaimedBatchOp, function: Callable[..., Any], kind: FrameKind, process: MortalProcess
    ) -> Callable[[Any, ClaimedBatch], None]:
        """Return a function of context and batch that passes the records as rows, and writes the result to the sink."""

        def processed(context: Any, batch: ClaimedBatch) -> None:  # noqa: ANN401 - the user's
            process.reach(CrashPoint.AFTER_CLAIM)
            batch.begin_processing()
            rows = frame_of(self.kafka.topics.read(batch.ranges), kind)
            result = mortal_function(function, process)(context, batch, rows)
            if op.spec.sink is None:
                require_no_rows(result, op.spec.function, op.name)
            elif batch.outcome is None:
                require_rows(result, op.spec.function)
            if result is not None:
                batch.write(result)

        return processed

    def _in_memory(self, process: MortalProcess) -> dict[str, object]:
        made = {key: in_memory(resource, self.kafka, process) for key, resource in self.resources.items()}
        return {**made, _SPARK_KEY: ResourceDefinition.hardcoded_resource(SparkInMemory(self.spark))}

    def _add_partition(self, instance: DagsterInstance) -> None:
        if self.partition_key is not None:
            instance.add_dynamic_partitions(f"kafka/{self.ops[0].spec.topic}", [self.partition_key])

    # Checks

    def _require_topics(self) -> None:
        existing = self.kafka.topics.partition_counts()
        for op in self.ops:
            if op.spec.topic not in existing and not op.spec.allow_missing_topic:
                raise ConfigurationError(
                    f"{op.name!r} reads topic {op.spec.topic!r}, but there is {', '.join(existing) or 'no topic'}: "
                    "add the topic to `records`"
                )

    def _require_claimers(self, given: Mapping[str, object]) -> None:
        """Raise `ConfigurationError` if a claimer is passed under another key than that of the ops."""
        wanted = {op.spec.claimer_key for op in self.ops}
        unused = [key for key, value in given.items() if isinstance(value, ClaimerResource) and key not in wanted]
        missing = sorted(wanted - self.resources.keys())
        if unused and missing:
            raise ConfigurationError(
                f"`resources` has a ClaimerResource {unused[0]!r}, but the claimer_key is {missing[0]!r}: pass the "
                f"claimer as {missing[0]!r}"
            )

    def _require_partition(self) -> None:
        """Raise `ConfigurationError` unless there is a partition key exactly if assets have Dagster partitions."""
        has_partitions = any(asset.partitions_def is not None for asset in _assets_of(self.claimed))
        if has_partitions and self.partition_key is None:
            raise ConfigurationError(
                "the asset has Dagster partitions, and each run processes one of them: pass partition_key, such as '0'"
            )
        if self.partition_key is not None and not has_partitions:
            raise ConfigurationError(
                f"partition_key is {self.partition_key!r}, but nothing that runs has Dagster partitions: remove it, or "
                "set per_partition of the asset"
            )

    def _require_sink(self) -> None:
        """Raise `ConfigurationError` if a sink is passed that no op uses, or one that cannot write rows."""
        if self.sink is None:
            return
        with_sink = [op for op in self.ops if op.spec.sink is not None]
        if not with_sink:
            raise ConfigurationError(
                f"{self.ops[0].name!r} has no sink, so the `sink` of the test would get no rows: remove it, or give "
                "the op a sink"
            )
        writes_frames = type(self.sink).__module__.startswith(_LIBRARY_SINKS)
        for op in with_sink:
            if writes_frames and self._kind(op) is not FrameKind.SPARK:
                raise ConfigurationError(
                    f"{self.sink!r} writes frames of Spark, but {op.name!r} gets rows without a session: pass `spark`"
                )

    def group(self) -> str:
        """Return the group of all ops; raise `ConfigurationError` if they have several."""
        claimers = {op.spec.claimer_key: self.resources[op.spec.claimer_key] for op in self.ops}
        for key, claimer in claimers.items():
            if not isinstance(claimer, ClaimerResource):
                raise ConfigurationError(
                    f"the resource {key!r} is a {type(claimer).__name__}, of which the group is not known: pass a "
                    "ClaimerResource with its group and delivery mode"
                )
        groups = {str(value_of(claimer.group)) for claimer in claimers.values() if isinstance(claimer, ClaimerResource)}
        if len(groups) != 1:
            raise ConfigurationError(
                f"the claimers of {', '.join(op.name for op in self.ops)} have the groups {sorted(groups)}: pass one "
                "ClaimerResource, and run the ops of other groups apart"
            )
        return groups.pop()


def _ops_of(claimed: Claimed) -> list[ClaimedBatchOp]:
    """Return the claimed-batch ops of what a test runs."""
    if isinstance(claimed, ClaimedBatchOp):
        return [claimed]
    if isinstance(claimed, AssetsDefinition) and isinstance(claimed.node_def, ClaimedBatchOp):
        return [claimed.node_def]
    if not isinstance(claimed, JobDefinition):
        raise ConfigurationError(
            f"{claimed!r} cannot run in memory: pass an asset of marshal_asset, an op of build_claimed_batch_op, or a "
            "job of such ops"
        )
    nodes: list[object] = [asset.node_def for asset in _assets_of(claimed)]
    nodes = nodes or [node.definition for node in claimed.graph.nodes]
    for graph in nodes:
        if isinstance(graph, GraphDefinition):
            _refuse_nested(claimed.name, graph)
    ops = [node for node in nodes if isinstance(node, ClaimedBatchOp)]
    if not ops:
        raise ConfigurationError(
            f"job {claimed.name!r} cannot run in memory, because it has neither an op of build_claimed_batch_op at its "
            "top level nor an asset of marshal_asset: pass one of these"
        )
    return ops


def _refuse_nested(job: str, graph: GraphDefinition) -> None:
    """Raise `ConfigurationError` if a graph has a claimed op, which would use its own sink and Spark session."""
    for node in graph.nodes:
        if isinstance(node.definition, ClaimedBatchOp):
            raise ConfigurationError(
                f"job {job!r} cannot run in memory, because op {node.name!r} is in its graph {graph.name!r}, where it "
                "would write to its real sink: pass the op itself"
            )
        if isinstance(node.definition, GraphDefinition):
            _refuse_nested(job, node.definition)


def _with_replaced_op(asset: AssetsDefinition, replaced: Mapping[ClaimedBatchOp, ClaimedBatchOp]) -> AssetsDefinition:
    """Return an asset with its replaced op; key and dependencies, which Dagster may have prefixed, stay."""
    if not isinstance(asset.node_def, ClaimedBatchOp):
        return asset
    attributes = {**asset.get_attributes_dict(), "node_def": replaced[asset.node_def], "resource_defs": {}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BetaWarning)  # of the argument `execution_type`
        return AssetsDefinition(**attributes)


def _assets_of(claimed: Claimed) -> list[AssetsDefinition]:
    """Return the asset itself, or the assets that a job materializes; none for an op or a job of ops."""
    if isinstance(claimed, AssetsDefinition):
        return [claimed]
    if not isinstance(claimed, JobDefinition):
        return []
    layer = claimed.asset_layer
    found = [layer.asset_graph.get(key).assets_def for key in sorted(layer.executable_asset_keys)]
    return list(dict.fromkeys(found))


def _resources_of_job(claimed: Claimed) -> dict[str, object]:
    if not isinstance(claimed, JobDefinition):
        return {}
    given = claimed.resource_defs.items()
    return {key: resource_in_job(resource) for key, resource in given if key != "io_manager"}


def _job_of_assets(
    claimed: Claimed, assets: Sequence[AssetsDefinition], resources: Mapping[str, object]
) -> JobDefinition:
    """Return a job of the assets, with the tags, hooks and retry policy of the job that a test runs."""
    selection = AssetSelection.assets(*(key for asset in assets for key in asset.keys))
    job = define_asset_job("assets_in_memory", selection)
    if isinstance(claimed, JobDefinition):
        job = define_asset_job(
            claimed.name,
            selection,
            tags=claimed.tags,
            run_tags=claimed.run_tags,
            hooks=claimed.hook_defs,
            op_retry_policy=claimed.op_retry_policy,
        )
    defs = Definitions(assets=assets, jobs=[job], resources=resources, executor=in_process_executor)
    return defs.resolve_job_def(job.name)


def _job_of(
    claimed: Claimed, replaced: Mapping[ClaimedBatchOp, ClaimedBatchOp], resources: Mapping[str, object]
) -> JobDefinition:
    """Return a job of the replaced ops."""
    if isinstance(claimed, ClaimedBatchOp):
        nodes: list[Any] = list(replaced.values())
        graph = GraphDefinition(name=f"{claimed.name}_in_memory", node_defs=nodes)
        return graph.to_job(resource_defs=resources, executor_def=in_process_executor)
    assert isinstance(claimed, JobDefinition)  # noqa: S101 - for the type checker
    given = claimed.graph
    nodes = [replaced.get(node.definition, node.definition) for node in given.nodes]  # type: ignore[call-overload]
    graph = GraphDefinition(
        name=given.name,
        node_defs=nodes,
        dependencies=given.dependencies,
        input_mappings=given.input_mappings,
        output_mappings=given.output_mappings,
        config=given.config_mapping,
    )
    return graph.to_job(
        resource_defs=resources,
        executor_def=in_process_executor,
        tags=claimed.tags,
        run_tags=claimed.run_tags,
        hooks=claimed.hook_defs,
        op_retry_policy=claimed.op_retry_policy,
    )


def _delivery_of(spec: BatchSpec) -> str:
    mode = DeliveryMode.AT_LEAST_ONCE if spec.sink is None else DeliveryMode.EFFECTIVELY_ONCE
    return mode.value


def _claimed_first(function: Callable[..., Any], process: MortalProcess) -> Callable[..., Any]:
    """Return a function that dies before it reads if the process crashes after its claim."""

    @functools.wraps(function)
    def processed(*arguments: Any) -> Any:  # noqa: ANN401 - the user's
        process.reach(CrashPoint.AFTER_CLAIM)
        return function(*arguments)

    return processed


def _record_as_failed(instance: DagsterInstance, run_id: str) -> None:
    """Record the run of a dead process as failed, as Dagster's run monitoring does."""
    run = instance.get_run_by_id(run_id)
    if run is not None and run.status not in FINISHED:
        instance.report_run_failed(run, "the simulated process of this run has died")
