"""The command line: `framework serve | generate | chat | plugins | env`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer

from . import __version__
from .errors import ConfigError, FrameworkError, InvalidRequest, ModelError, PluginError
from .flags import with_settings
from .settings import Settings, unknown_variables

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

FRONTENDS = "framework.frontends"
"""Entry points `serve(settings, plugins, ui) -> int | None`: how the core runs a server without importing it."""

app = typer.Typer(
    help="Serve large language models; every decision of the engine is a plugin.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)


@contextmanager
def reported() -> Iterator[None]:
    """Errors that are the user's to fix become red lines and an exit code; everything else keeps its traceback."""
    try:
        yield
    except FrameworkError as error:
        for line in str(error).splitlines() or [type(error).__name__]:
            typer.echo(typer.style("error: ", fg="red", bold=True) + line, err=True)
        raise typer.Exit(
            2 if isinstance(error, ConfigError | PluginError | ModelError | InvalidRequest) else 1
        ) from None


def _version(shown: bool) -> None:
    if shown:
        typer.echo(f"framework {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _serve(settings: Settings) -> None:
    """Serve a model over HTTP with an OpenAI-compatible API."""
    from .registry import load_plugins
    from .terminal import TerminalUI

    _warn()
    plugins = load_plugins()
    (frontend,) = entry_points(group=FRONTENDS, name="http")
    with TerminalUI() as ui:
        code = frontend.load()(settings, plugins, ui)
    raise typer.Exit(code or 0)


app.command("serve")(reported()(with_settings(_serve, model=True)))


def _generate(
    settings: Settings,
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest tokens of this share only.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; repeatable.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw", help="Apply the chat template or not; default: if there is one.", show_default=False
        ),
    ] = None,
) -> None:
    """Generate once and print the text as it comes."""
    from .llm import LLM
    from .log import configure
    from .terminal import TerminalUI
    from .types import SamplingParams

    _warn()
    text = _piped("prompt").removesuffix("\n") if prompt == "-" else prompt
    if not (text if chat is False else text.strip()):
        raise InvalidRequest("prompt", "the prompt is empty")
    fields = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "stop": tuple(stop or ())}
    given: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    if "seed" in settings.model_fields_set:
        given["seed"] = settings.seed
    SamplingParams(**given).check(vocab_size=2**31)  # before anything is loaded
    configure(settings.log_level, settings.log_format, process="generate")
    with TerminalUI() as ui, LLM(settings=settings, progress=ui.progress) as llm:
        ui.close()
        if chat is None:
            chat = llm.tokenizer.chat_template is not None
        for piece in llm.stream([{"role": "user", "content": text}] if chat else text, given):
            sys.stdout.write(piece)
            sys.stdout.flush()
    sys.stdout.write("\n")


app.command("generate")(reported()(with_settings(_generate, without=("Server", "Tracing"))))


@app.command("chat")
@reported()
def _chat(
    message: Annotated[
        str | None,
        typer.Argument(help="Say this, print the answer and end; - reads it from standard input, as does a pipe."),
    ] = None,
    url: Annotated[
        str, typer.Option(help="Base URL of any server with an OpenAI-compatible API; /v1 is added if it has no path.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the first that the server lists.")] = None,
    system: Annotated[str | None, typer.Option(help="Instruction to begin with.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    uds: Annotated[Path | None, typer.Option(help="Unix socket on which the server listens.")] = None,
    ca_file: Annotated[
        Path | None, typer.Option(help="Certificates that vouch for the server, in PEM; default: SSL_CERT_FILE.")
    ] = None,
) -> None:
    """Chat in the terminal with a server. FRAMEWORK_API_KEY or OPENAI_API_KEY is its key."""
    from .chat import Chat, Server, note

    alone = message is not None or not sys.stdin.isatty()
    if message == "-" or (message is None and alone):
        message = _piped("message")
    if message is not None and not message.strip():
        raise InvalidRequest("message", "the message is empty")
    given = {"max_tokens": max_tokens, "temperature": temperature}
    with Server(url, uds, ca_file) as server:
        server.check()
        chat = Chat(
            server,
            model or server.model(),
            system,
            {name: value for name, value in given.items() if value is not None},
        )
        if message is not None:
            chat.say(message.strip())
        else:
            note(f"{chat.model} at {server.url}; /help lists commands, Ctrl-D leaves")
            chat.loop()


def _piped(what: str) -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequest(what, f"the {what} on standard input is not UTF-8: see byte {error.start}") from None


def _warn() -> None:
    for problem in unknown_variables():
        typer.echo(typer.style("warning: ", fg="yellow") + problem, err=True)


plugins_app = typer.Typer(help="What can be selected: every provider by kind.", invoke_without_command=True)
app.add_typer(plugins_app, name="plugins")


@plugins_app.callback()
@reported()
def _plugins(context: typer.Context) -> None:
    if context.invoked_subcommand is not None:
        return
    from .registry import load_plugins

    plugins = load_plugins()
    rows = [
        (p.kind, p.name, " ".join(plugins.origin(p)), p.summary)
        for p in sorted(plugins.providers(), key=lambda p: (p.kind, p.name))
    ]
    _columns([("kind", "name", "package", "summary"), *rows])


@plugins_app.command("show")
@reported()
def _show(name: Annotated[str, typer.Argument(help="Name of a provider, as `framework plugins` lists it.")]) -> None:
    """Print a provider's options: types, defaults, descriptions."""
    from .registry import load_plugins

    plugins = load_plugins()
    found = [p for p in plugins.providers() if name in (p.name, f"{p.kind}/{p.name}")]
    if not found:
        names = ", ".join(sorted({p.name for p in plugins.providers()}))
        raise ConfigError(f"{name}: no such provider; available: {names}")
    for provider in found:
        typer.echo(f"{provider.kind} {provider.name} ({' '.join(plugins.origin(provider))})")
        if provider.summary:
            typer.echo(f"  {provider.summary}")
        fields: dict[str, FieldInfo] = getattr(provider.options, "model_fields", {})
        typer.echo("  options:" if fields else "  no options")
        _columns([_option(option, info) for option, info in fields.items()], indent="    ")


_LIMITS = {
    "gt": ">",
    "ge": ">=",
    "lt": "<",
    "le": "<=",
    "multiple_of": "multiple of",
    "min_length": "length >=",
    "max_length": "length <=",
    "pattern": "like",
}
"""How the limits of a pydantic field are shown."""


def _option(name: str, info: FieldInfo) -> tuple[str, str, str, str]:
    default = "required" if info.is_required() else f"default {info.get_default(call_default_factory=True)!r}"
    return name, _type(info.annotation, info.metadata), default, info.description or ""


def _type(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """A type and its limits in words: `float > 0 or None`, `dict[str, float > 0]`."""
    limits = [
        f"{sign} {getattr(limit, attribute)}"
        for limit in metadata
        for attribute, sign in _LIMITS.items()
        if getattr(limit, attribute, None) is not None
    ]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = (getattr(entry, "metadata", [entry]) for entry in arguments[1:])
        kind = _type(arguments[0], chain.from_iterable(inner))
    elif origin in (Union, UnionType):
        kind = " or ".join(map(_type, arguments))
    elif origin is Literal:
        kind = " or ".join(map(repr, arguments))
    elif origin is not None:
        kind = f"{getattr(origin, '__name__', origin)}[{', '.join(map(_type, arguments))}]"
    else:
        kind = "None" if annotation is NoneType else getattr(annotation, "__name__", str(annotation))
    return " ".join([kind, *limits])


def _columns(rows: Sequence[tuple[str, ...]], indent: str = "") -> None:
    """Aligned, never cut: whoever pipes this somewhere gets every word."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo(indent + "  ".join(cells).rstrip())


@app.command("env")
@reported()
def _env() -> None:
    """Print what a bug report needs: versions, machine, devices, plugins, settings without secrets."""
    from .environment import report

    _warn()
    for section, rows in report():
        typer.echo(section)
        _columns(rows, indent="  ")
