"""Turns the arguments of ``transformWithState`` and its relatives into the operator that the driver runs."""

from __future__ import annotations

import logging
from dataclasses import KW_ONLY, dataclass
from typing import Any

from pyspark.errors import ParseException
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import DataType, StructType

from backend_client.batch_time import TimeMode
from backend_client.columnar.processor import ColumnarProcessor
from backend_client.spark.columnar_plan import ColumnarPlan
from backend_client.spark.columns import nullable
from backend_client.spark.driver.initial_state import initial_state_of
from backend_client.spark.event_time import has_watermark, mark_event_time
from backend_client.spark.private.session import setting
from backend_client.spark.processor_methods import check_columnar_names, check_is_object, check_methods
from backend_client.spark.query import Operator, Query
from backend_client.spark.task.state_handle import declare_states
from backend_client.state.codec import KeyCodec
from dstl_service.wire import validate_operator
from storage.errors import InvalidInputError

logger = logging.getLogger("backend_client")


@dataclass(frozen=True, slots=True)
class OperatorInput:
    """An operator's input: the query up to that point, the schema of its rows and the key columns."""

    query: Query
    schema: StructType
    key_columns: tuple[str, ...]

    def check_name(self, name: str) -> None:
        """
        Check the name of the next operator, and the names of its input's columns.

        Raises:
            InvalidInputError: The name is invalid or already used by another operator of the query, or two columns of
                the input have one name.
        """
        validate_operator(name)
        self._check_columns(name)
        if any(operator.name == name for operator in self.query.operators):
            raise InvalidInputError(f"two operators are named {name!r}; give one of them another name=…")

    def _check_columns(self, operator: str) -> None:
        plain = [column.lower() for column in self.schema.names]
        if len(set(plain)) == len(plain):
            return
        names = self.schema.names
        if setting(self.query.spark, "spark.sql.caseSensitive", "false") != "true":
            names = plain
        twice = [one for one, name in zip(self.schema.names, names, strict=True) if names.count(name) > 1]
        if twice:
            raise InvalidInputError(
                f"the input of operator {operator!r} has several columns of one name: {', '.join(twice)}. Rename or "
                "drop all but one before groupBy"
            )


@dataclass(frozen=True, slots=True)
class TransformOptions:
    """The arguments with Spark's names, in Spark's order; see `ChangelogStateBackend.transform_with_state`."""

    statefulProcessor: StatefulProcessor
    outputStructType: StructType | str
    outputMode: str
    timeMode: str
    initialState: Any = None
    eventTimeColumnName: str = ""
    _: KW_ONLY
    name: str | None = None
    parallelism: int | None = None
    pandas: bool = False


def row_operator(given: OperatorInput, options: TransformOptions) -> Operator:
    """
    Return the operator for a processor of the Row or pandas API.

    Raises:
        InvalidInputError: An argument is invalid or asks for an unsupported feature.
    """
    output_mode, time_mode = _output_mode(options.outputMode), TimeMode.of(options.timeMode)
    processor, output_schema = options.statefulProcessor, options.outputStructType
    check_is_object(processor)
    name = options.name or type(processor).__name__
    given.check_name(name)
    output_schema = _struct(output_schema)
    if options.eventTimeColumnName:
        output_schema = mark_event_time(output_schema, options.eventTimeColumnName, given.schema)
    check_methods(name, processor, has_initial_rows=options.initialState is not None)
    states, recreated_states = declare_states(name, processor, _parse, time_mode)
    key_types = [given.schema[column].dataType for column in given.key_columns]
    operator = Operator(
        name=name,
        processor=processor,
        key_columns=given.key_columns,
        input_schema=given.schema,
        output_schema=nullable(output_schema),
        states=states,
        recreated_states=recreated_states,
        parallelism=options.parallelism,
        steps=given.query.steps,
        pandas=options.pandas,
        time_mode=time_mode,
        output_mode=output_mode,
        initial=None if options.initialState is None else initial_state_of(options.initialState, key_types),
        is_named=bool(options.name),
    )
    if options.eventTimeColumnName and time_mode is not TimeMode.EVENT and not has_watermark(given.schema):
        logger.warning(
            "operator %r has eventTimeColumnName %r, but no column of its input has a watermark, so for operators "
            "after it no row is late, and without a watermark before it their timers never fire. Call withWatermark "
            "before groupBy",
            name,
            options.eventTimeColumnName,
        )
    if time_mode is TimeMode.EVENT and operator.event_time is None:
        logger.warning(
            "operator %r has timeMode 'EventTime', but no column of its input has a watermark, so no row is late, and "
            "without a watermark before it timers never fire. Call withWatermark before groupBy; if the input is "
            "another operator's result, set that operator's eventTimeColumnName",
            name,
        )
    return _groupable(operator)


def columnar_operator(
    given: OperatorInput,
    processor: ColumnarProcessor,
    output_schema: StructType | str | None,
    output_mode: str,
    *,
    name: str | None,
    parallelism: int | None,
) -> Operator:
    """
    Return the operator for a columnar processor; arguments as in `ChangelogStateBackend.transform_columns`.

    Raises:
        InvalidInputError: An argument is invalid, or the processor does not fit the input.
    """
    output_mode = _output_mode(output_mode)
    check_is_object(processor)
    is_named, name = bool(name), name or type(processor).__name__
    given.check_name(name)
    is_first = not given.query.operators
    check_columnar_names(name, processor)
    plan = ColumnarPlan.of(processor, output_mode, given.schema, given.key_columns, is_first=is_first)
    output_schema = plan.output_schema() if output_schema is None else _struct(output_schema)
    return _groupable(
        Operator(
            name=name,
            processor=plan,
            key_columns=given.key_columns,
            input_schema=given.schema,
            output_schema=nullable(output_schema),
            states=plan.states(),
            parallelism=parallelism,
            steps=given.query.steps,
            output_mode=output_mode,
            is_named=is_named,
        )
    )


def _struct(given: Any) -> StructType:
    """Return an `outputStructType`; `InvalidInputError` if it is none, or has two columns of one name."""
    schema = _parse(given) if isinstance(given, str) else given
    if not isinstance(schema, StructType):
        raise InvalidInputError(
            f"outputStructType must be a StructType or text such as 'name string, total double', not {given!r}"
        )
    twice = next((name for name in schema.names if schema.names.count(name) > 1), None)
    if twice is not None:
        raise InvalidInputError(f"outputStructType has the column {twice!r} more than once; give each its own name")
    return schema


def _groupable(operator: Operator) -> Operator:
    KeyCodec(operator.key_schema.json())  # refuses key types that cannot be grouped by
    return operator


def _parse(text: str) -> StructType:
    try:
        parsed = DataType.fromDDL(text)
    except ParseException as error:
        reason = error.getCondition() or "PARSE_SYNTAX_ERROR"
        raise InvalidInputError(
            f"{text!r} is not a schema ({reason}); write it as 'name type, name type', with Spark's types"
        ) from error
    if not isinstance(parsed, StructType):
        raise InvalidInputError(f"{text!r} is not a schema of named columns; write it as 'name type, name type'")
    return parsed


def _output_mode(text: str) -> str:
    """Return an output mode as Spark spells it; `InvalidInputError` for an unsupported one."""
    if not isinstance(text, str) or text.lower() not in ("update", "append"):
        raise InvalidInputError(f"outputMode must be 'Update' or 'Append', not {text!r}")
    return text.capitalize()
