"""The settings as command line flags: one flag per field, all optional, so that `Settings` alone decides what wins."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import typer
import yaml

from .errors import ConfigError, brief
from .settings import Settings, flag, read_yaml, variable


class Flag(NamedTuple):
    """One setting as the user meets it. `metavar` is empty for a switch; `default` is empty where there is none, and
    so is `alias`, the flag's other name."""

    field: str
    panel: str
    name: str
    metavar: str
    default: str
    description: str
    variable: str
    alias: str = ""

    @property
    def repeatable(self) -> bool:
        return self.metavar in ("KEY=VALUE", "NAME")


def flags() -> list[Flag]:
    """Every setting, in the order of the model."""
    found = []
    for field, info in Settings.model_fields.items():
        extra = info.json_schema_extra
        panel, alias = (str(extra["group"]), str(extra["alias"])) if isinstance(extra, dict) else ("Options", "")
        default = "" if info.default in (None, {}, ()) else str(info.default).lower()
        metavar = _metavar(info.annotation)
        description = info.description or ""
        if metavar == "CHOICE":
            description += f" One of {', '.join(get_args(info.annotation))}."
        if alias:
            description += f" Also {flag(alias)}."
        other = flag(alias) if alias else ""
        found.append(Flag(field, panel, flag(field), metavar, default, description, variable(field), other))
    return found


def _metavar(annotation: Any) -> str:
    kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
    if get_origin(annotation) is Literal:
        return "CHOICE"
    if get_origin(annotation) is dict:
        return "KEY=VALUE"
    if get_origin(annotation) is tuple:
        return "NAME"
    kind = kinds[0] if kinds else annotation
    return {bool: "", int: "INTEGER", float: "NUMBER", Path: "PATH"}.get(kind, "TEXT")


def with_settings(run: Callable[..., None], without: Sequence[str] = (), model: bool = False) -> Callable[..., None]:
    """`run(settings, **others)` as a command that takes every setting but those of the panels `without`, and
    --config, besides the parameters of `run` itself. model: an argument may say what --model does."""
    own = list(inspect.signature(run, eval_str=True).parameters.values())[1:]
    taken = [option for option in flags() if option.panel not in without]

    def command(**values: Any) -> None:
        config = values.pop("config")
        given = {option.field: _value(option, values.pop(option.field)) for option in taken}
        for option in (option for option in taken if option.alias):
            other = values.pop(_parameter_name(option.alias))
            if other is not None and given[option.field] is not None:
                raise ConfigError(f"{option.alias} is another name of {option.name}: give one of them")
            given[option.field] = given[option.field] if other is None else other
        argument = values.pop("argument", None)
        if argument is not None and given["model"] not in (None, argument):
            raise ConfigError("MODEL is another spelling of --model: give one of them")
        given["model"] = given["model"] if argument is None else argument
        run(Settings.load(config, **given), **values)

    config = inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            Path | None,
            typer.Option(
                metavar="FILE",
                envvar=variable("config"),
                show_envvar=False,
                help=f"YAML file of settings, spelt as the flags are. \\[env: {variable('config')}]",
            ),
        ],
    )
    spelt = typer.Argument(metavar="MODEL", help="Another spelling of --model.", show_default=False)
    argument = inspect.Parameter(
        "argument", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, spelt]
    )
    parameters = [
        *([argument] if model else []),
        *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own),
        config,
        *(_parameter(option) for option in taken),
        *(_hidden(option.alias) for option in taken if option.alias),
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = run.__doc__
    return command


def _parameter(option: Flag) -> inspect.Parameter:
    notes = [f"\\[default: {option.default}]"] if option.default else []
    notes.append(f"\\[env: {option.variable}]")
    info = typer.Option(
        f"{option.name}/--no-{option.name[2:]}" if not option.metavar else option.name,
        metavar=option.metavar or None,
        help=" ".join([option.description, *notes]),
        rich_help_panel=option.panel,
        show_default=False,
    )
    # Values stay text here: the settings model converts and checks them, whichever way they came.
    kind: Any = bool if not option.metavar else list[str] if option.repeatable else str
    return inspect.Parameter(
        option.field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )


def _parameter_name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _hidden(alias: str) -> inspect.Parameter:
    """Another name of a flag that takes a text: --help names it where it describes the flag."""
    info = Annotated[str | None, typer.Option(alias, hidden=True)]
    return inspect.Parameter(_parameter_name(alias), inspect.Parameter.KEYWORD_ONLY, default=None, annotation=info)


def _value(option: Flag, given: Any) -> Any:
    if option.metavar == "KEY=VALUE":
        return _pairs(option, given or ())
    if option.repeatable:
        return tuple(given) if given else None
    return given


def _pairs(option: Flag, given: Sequence[str]) -> dict[str, Any] | None:
    """`["a=1", "b=x"]` -> `{"a": 1, "b": "x"}`; values are YAML scalars."""
    found: dict[str, Any] = {}
    for text in given:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise ConfigError(f"{option.name}: {brief(repr(text), 80)} is not key=value")
        try:
            found[key] = read_yaml(value)
        except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: dates and numbers that are none
            raise ConfigError(f"{option.name}: the value in {brief(repr(text), 80)} is not a YAML value") from None
    return found or None


def panels() -> Iterator[tuple[str, list[Flag]]]:
    """The flags by panel, both in the order of the model."""
    grouped: dict[str, list[Flag]] = {}
    for option in flags():
        grouped.setdefault(option.panel, []).append(option)
    yield from grouped.items()
