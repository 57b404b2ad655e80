"""Every setting, once: flags, environment variables, the YAML file, --help and the reference come from here.

Precedence: flags, then FRAMEWORK_* variables, then the YAML file, then the defaults below.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import string
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec
import yaml
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from .errors import ConfigError, brief, one_line

ENV_PREFIX = "FRAMEWORK_"
API_KEY = "api_key"
"""No setting, but a variable that the server reads: a flag would show in lists of processes, a setting in files."""
DEFAULT_KV_MEMORY = "0.3"
"""Of the memory that is free, where the pool is in the host's."""
DEFAULT_DEVICE_MEMORY = "0.9"
"""Of a GPU's whole memory, weights and steps included."""
DEFAULT_SWAP_SPACE = "0.25"
_INT32, _INT64 = 2**31 - 1, 2**63 - 1
_DAY = 86400.0
_file_values: ContextVar[Mapping[str, Any] | None] = ContextVar("file_values", default=None)
_UNITS = {"": 1, "b": 1}
_NOTHING = re.compile(r"\s*(0+\.?0*|\.0+)\s*([kmgt]?i?b?)\s*", re.IGNORECASE)
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def parse_memory(text: str) -> int | float:
    """Bytes (int), or a fraction in (0, 1] (float). Fewer than 1000 bytes without a unit are GiB to other engines."""
    number = text.strip().rstrip(string.ascii_letters + " ")
    unit = text.strip()[len(number) :].strip().lower()
    try:
        value = float(number)
        if not unit and 0 < value <= 1:
            return value
        if unit in _UNITS and value > 0 and (unit or (value.is_integer() and value >= 1000)):
            return int(value * _UNITS[unit])
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"{brief(repr(text), 80)} is not a size such as 2GiB or 512MB, nor a fraction such as 0.3")


def host_blocks(space: str | None, blocks: int, block_bytes: int) -> int:
    """KV blocks of the host tier: `--swap-space`, for a device pool of `blocks`."""
    space = space or DEFAULT_SWAP_SPACE
    if _NOTHING.fullmatch(space):
        return 0
    amount = parse_memory(space)
    return int(amount * blocks) if isinstance(amount, float) else amount // max(1, block_bytes)


def setting(default: Any, group: str, help: str, alias: str = "") -> Any:
    """A field of `Settings`: `group` is its panel in --help, `alias` another name for its flag, as users of other
    engines may know it."""
    return Field(default, description=help, json_schema_extra={"group": group, "alias": alias})


class Settings(BaseSettings):
    """What a run is made of. Field `max_model_len` is the flag --max-model-len and the variable
    FRAMEWORK_MAX_MODEL_LEN."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        extra="forbid",
        frozen=True,
        env_ignore_empty=True,
        protected_namespaces=(),
        coerce_numbers_to_str=True,
    )

    model: str | None = setting(None, "Model", "Directory, .gguf file or hub id. Default: the installed demo weights.")
    revision: str | None = setting(None, "Model", "Branch, tag or commit of a hub model.")
    served_model_name: Annotated[tuple[str, ...], NoDecode] = setting(
        (),
        "Model",
        "Name clients use; repeatable, the first is shown. Default: the value of --model, of a path its last part.",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = setting(
        "auto",
        "Model",
        "Type of weights and activations; auto: bfloat16 where the hardware has it, else float32.",
    )
    quantization: Literal["none", "int8"] = setting(
        "none",
        "Model",
        "int8: weights of linear layers in 8 bits, made from any checkpoint as it loads, times activations in 8 bits.",
    )
    max_model_len: Annotated[int | None, Field(ge=1, le=_INT32)] = setting(
        None, "Model", "Longest prompt plus output, in tokens; default: what the model and the KV pool allow."
    )
    generation_config: str = setting(
        "auto", "Model", "auto: the checkpoint's generation_config.json; none: ignore it; or a directory."
    )
    chat_template: Path | None = setting(None, "Model", "Jinja file used instead of the checkpoint's chat template.")
    model_impl: str = setting("auto", "Model", "Model provider; auto: the one that lists the architecture.")
    seed: Annotated[int, Field(ge=-_INT64 - 1, le=_INT64)] = setting(
        0, "Model", "Seeds the seeds of requests that bring none."
    )

    host: str = setting("127.0.0.1", "Server", "Address to listen on.")
    port: Annotated[int, Field(ge=0, le=65535)] = setting(8000, "Server", "Port to listen on; 0 picks a free one.")
    uds: Path | None = setting(
        None, "Server", "Listen on this Unix socket instead of an address; the umask says who may connect."
    )
    root_path: str = setting(
        "", "Server", "Prefix such as /llm under which a proxy serves this server, whether it takes it away or not."
    )
    cors_origin: Annotated[tuple[str, ...], NoDecode] = setting(
        (),
        "Server",
        "Origin of web pages whose scripts may call this server, such as https://chat.example.org, or * for all; "
        "repeatable. Default: none may.",
    )
    api_key_file: Path | None = setting(
        None,
        "Server",
        "Accept only the API keys of this file, a name:key in each line; the variable FRAMEWORK_API_KEY is one more "
        "key, named default. Without keys everybody is served.",
    )
    ssl_certfile: Path | None = setting(
        None, "Server", "Speak HTTPS with this certificate, and those that vouch for it; a PEM file."
    )
    ssl_keyfile: Path | None = setting(
        None, "Server", "Key of the certificate, in PEM without a password; default: it is in --ssl-certfile."
    )
    metrics_compat: Literal["none", "vllm"] = setting(
        "none", "Server", "vllm: /metrics has what there is under vLLM's names, too, for dashboards and gateways."
    )
    max_queued_requests: Annotated[int, Field(ge=1, le=_INT32)] = setting(
        1024,
        "Server",
        "Most sequences (choices of prompts) that wait for their first token; further ones are refused with 429.",
    )
    max_queued_tokens: Annotated[int | None, Field(ge=1, le=_INT64)] = setting(
        None, "Server", "Most prompt tokens of requests that wait for their first token; default: no limit."
    )
    tool_parser: str = setting(
        "auto",
        "Server",
        "Tool parser provider: how the model writes calls of tools; auto: the first that fits the chat template; none: "
        "calls stay in the text.",
    )
    request_timeout: Annotated[float | None, Field(gt=0, le=_DAY)] = setting(
        None, "Server", "Seconds after which a response ends with what there is of it; default: no limit."
    )
    step_timeout: Annotated[float, Field(gt=0, le=_DAY)] = setting(
        300.0,
        "Server",
        "Seconds without a finished step while requests wait, after which the engine is restarted.",
    )
    drain_seconds: Annotated[float, Field(ge=0, le=_DAY)] = setting(
        30.0, "Server", "SIGTERM: how long responses that have begun may go on; 0: they end at once."
    )

    grammar_timeout: Annotated[float, Field(gt=0, le=600)] = setting(
        5.0, "Server", "Seconds that a schema, regex or grammar may take to compile; what takes longer is refused."
    )

    scheduler: str = setting("fcfs", "Scheduling", "Scheduler provider.")
    scheduler_opt: dict[str, Any] = setting({}, "Scheduling", "Option of the scheduler, key=value; repeatable.")
    max_num_seqs: Annotated[int, Field(ge=1, le=2**16)] = setting(256, "Scheduling", "Most requests running at once.")
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=2**20)] = setting(
        2048, "Scheduling", "Most tokens computed in one step: the budget that chunks long prompts."
    )

    kv: str = setting("paged", "KV cache", "KV cache provider.")
    kv_opt: dict[str, Any] = setting({}, "KV cache", "Option of the KV cache, key=value; repeatable.")
    block_size: Annotated[int, Field(ge=1, le=2**16)] = setting(16, "KV cache", "Tokens per KV block.")
    kv_dtype: Literal["auto", "int8", "fp8_e5m2", "fp8_e4m3"] = setting(
        "auto",
        "KV cache",
        "Type of keys and values; auto: that of activations; int8: a scale per token and head; fp8: 8-bit floats, no "
        "scale.",
    )
    kv_memory: str | None = setting(
        None,
        "KV cache",
        f"Size of the pool: 2GiB, 512MB, or a fraction: of the free memory on a CPU (default: {DEFAULT_KV_MEMORY}); of "
        f"all memory on a GPU, for weights, steps and pool (default: {DEFAULT_DEVICE_MEMORY}). By default less where "
        "--max-num-seqs requests of full length need less.",
        alias="gpu_memory_utilization",
    )
    kv_blocks: Annotated[int | None, Field(ge=1, le=_INT32)] = setting(
        None, "KV cache", "Exact number of blocks in the pool; overrides --kv-memory."
    )
    swap_space: str | None = setting(
        None,
        "KV cache",
        "Host memory for the blocks of preempted requests: 4GiB, or a fraction of the pool; 0: none. Taken when first "
        f"used. Default: {DEFAULT_SWAP_SPACE}, or less where less is free.",
    )
    preemption: Literal["auto", "swap", "recompute"] = setting(
        "auto", "KV cache", "What becomes of a preempted request's blocks; auto: what is measured to be cheaper."
    )
    prefix_cache: bool = setting(
        True, "KV cache", "Share KV blocks between requests that begin alike; --no-prefix-cache: never."
    )

    kernel: str = setting("auto", "Execution", "Kernel backend provider; auto: the first that supports the machine.")
    kernel_opt: dict[str, Any] = setting({}, "Execution", "Option of the kernel backend, key=value; repeatable.")
    sampler: str = setting("default", "Execution", "Sampler provider.")
    sampler_opt: dict[str, Any] = setting({}, "Execution", "Option of the sampler, key=value; repeatable.")
    executor: str = setting("torch", "Execution", "Executor provider.")
    executor_opt: dict[str, Any] = setting({}, "Execution", "Option of the executor, key=value; repeatable.")
    device: str = setting("auto", "Execution", "auto, cpu, cuda or cuda:N.")
    cuda_graphs: Literal["auto", "off", "decode"] = setting(
        "auto",
        "Execution",
        "decode: steps in which all requests decode are captured at the start, and replayed; auto: where device and "
        "kernel backend have graphs.",
    )
    overlap: Literal["auto", "on", "off"] = setting(
        "auto",
        "Execution",
        "on: plan a step and build its inputs while the device runs the one before; auto: off.",
    )
    threads: Annotated[int | None, Field(ge=1, le=1024)] = setting(
        None,
        "Execution",
        "CPU threads of the engine; default: one for each core there is, from 8 on one less.",
    )

    plugin: tuple[str, ...] = setting(
        (),
        "Plugins",
        "Augmenting plugin to activate (quota, audit, logits processor); repeatable, first called first.",
    )
    plugin_opt: dict[str, Any] = setting({}, "Plugins", "Option of an augmenting plugin, name.key=value; repeatable.")
    strict_plugins: bool = setting(False, "Plugins", "Stop the engine at the first fault of a policy.")

    otlp_endpoint: str | None = setting(
        None, "Tracing", "Export OpenTelemetry traces to this OTLP/HTTP URL; unset: no tracing, no cost."
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "Logs", "Least severe log line.")
    log_format: Literal["auto", "text", "json"] = setting("auto", "Logs", "How log lines look; auto: text.")

    @field_validator("*", mode="before")
    @classmethod
    def _can_be_sent(cls, value: Any) -> Any:
        """The engine process must be able to receive it, whatever an option's own model says of it later."""
        try:
            msgspec.msgpack.encode(value, enc_hook=str)
        except UnicodeEncodeError:
            raise ValueError(f"{brief(repr(value), 80)} is not valid UTF-8") from None
        except OverflowError:
            raise ValueError("must not hold an integer of more than 64 bits") from None
        except RecursionError:
            raise ValueError("is nested too deeply") from None
        return value

    @field_validator("model", "host", "device")
    @classmethod
    def _not_empty(cls, value: str | None) -> str | None:
        if value == "":
            raise ValueError("must not be empty")
        return value

    @field_validator("served_model_name", "cors_origin", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        """A variable holds one value, or a JSON list of several."""
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value) if value.startswith("[") else (value,)
        except ValueError:
            return (value,)

    @field_validator("served_model_name")
    @classmethod
    def _names_not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("must not be empty")
        return value

    @field_validator("host")
    @classmethod
    def _host(cls, value: str) -> str:
        try:
            value.encode("idna")  # as a look-up does
        except UnicodeError:
            raise ValueError(f"{brief(repr(value), 80)} is neither an address nor a host name") from None
        return value

    @field_validator("root_path")
    @classmethod
    def _root_path(cls, value: str) -> str:
        if value and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", value):
            raise ValueError(f"{brief(repr(value), 80)} is no prefix such as /llm: it begins with / and ends without")
        return value

    @field_validator("cors_origin")
    @classmethod
    def _cors_origin(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\sA-Z/?#@,*]+", origin):
                raise ValueError(
                    f"{brief(repr(origin), 80)} is neither * nor an origin such as https://example.org:8443"
                )
        return value

    @field_validator("plugin", mode="before")
    @classmethod
    def _plugin(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("overlap", "cuda_graphs", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    @field_validator("kv_memory")
    @classmethod
    def _kv_memory(cls, value: str | None) -> str | None:
        if value is not None:
            parse_memory(value)
        return value

    @field_validator("swap_space")
    @classmethod
    def _swap_space(cls, value: str | None) -> str | None:
        host_blocks(value, 1, 1)
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, InitSettingsSource(settings_cls, dict(_file_values.get() or {}))

    @classmethod
    def load(cls, config: Path | None = None, **flags: Any) -> Self:
        """Settings from `flags` (None: not given), FRAMEWORK_* variables and the YAML file `config`.

        Raises `ConfigError` with one line per problem, which says where the value came from.
        """
        given = _renamed({name: value for name, value in flags.items() if value is not None}, "")
        values = _renamed(_read(config), f" in {config}") if config else {}
        token = _file_values.set(values)
        try:
            return cls(**given)
        except ValidationError as error:
            raise ConfigError("\n".join(_problems(error, given, values, config))) from None
        except SettingsError as error:
            field = re.search(r'"(\w+)"', str(error))
            name = variable(field[1]) if field else f"{ENV_PREFIX}*"
            raise ConfigError(f'{name}: must be JSON, such as {{"key": 1}} or ["name"]') from None
        except RecursionError:  # from the parser of variables that hold JSON: the file has been read before
            raise ConfigError(f"{ENV_PREFIX}*: a variable's JSON is nested too deeply") from None
        finally:
            _file_values.reset(token)


def _renamed(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """With the fields' own names in place of other ones."""
    known = {}
    for field, info in Settings.model_fields.items():
        if isinstance(info.json_schema_extra, dict) and info.json_schema_extra["alias"]:
            known[str(info.json_schema_extra["alias"])] = field
    for alias, field in known.items():
        if alias in values and field in values:
            raise ConfigError(f"{alias}{where} is another name of {field}: give one of them")
    return {known.get(name, name): value for name, value in values.items()}


def flag(field: str) -> str:
    """`max_model_len` -> `--max-model-len`."""
    return "--" + field.replace("_", "-")


def variable(field: str) -> str:
    """`max_model_len` -> `FRAMEWORK_MAX_MODEL_LEN`."""
    return ENV_PREFIX + field.upper()


def selector(kind: str) -> str:
    """How a user selects a provider: the flag for its kind; for a kind that has none, what code calls it."""
    field = {"model": "model_impl"}.get(kind, kind)  # --model names the weights
    return flag(field) if field in Settings.model_fields else kind


def option_flag(kind: str, name: str, option: str) -> str:
    """How a user sets an option of a provider."""
    if kind == "plugin":
        return f"--plugin-opt {name}.{option}"
    return f"--{kind}-opt {option}" if f"{kind}_opt" in Settings.model_fields else f"{kind} option {option}"


def nearest(name: str, known: Mapping[str, Any], prefix: str = "") -> str:
    """The end of an error message: the known name that was probably meant, behind `prefix`; or nothing."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def unknown_variables() -> list[str]:
    """One sentence for each FRAMEWORK_* variable that is no setting: most likely a typing error."""
    known = {field.upper(): None for field in (*Settings.model_fields, API_KEY, "config")}
    given = sorted(name.removeprefix(ENV_PREFIX) for name in os.environ if name.startswith(ENV_PREFIX))
    # Compared without the prefix, which alone would make any two alike.
    return [
        f"{ENV_PREFIX}{name} is no setting{nearest(name, known, ENV_PREFIX)}" for name in given if name not in known
    ]


class _Loader(yaml.SafeLoader):
    """As YAML 1.2 has it, only true and false are booleans: `off` is a value of some settings."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - the base class's, whose lists must not be changed
        first: [
            (tag, re.compile("^(true|True|TRUE|false|False|FALSE)$") if tag.endswith(":bool") else pattern)
            for tag, pattern in resolvers
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def read_yaml(text: str) -> Any:
    """Raises `yaml.YAMLError`, and `ValueError` for dates and numbers that are none."""
    return yaml.load(text, _Loader)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = read_yaml(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"--config: {path} is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: bad UTF-8, dates and numbers that are none
        raise ConfigError(f"--config: {path} is not YAML: {one_line(error)}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config: {path} must hold a mapping such as `max_num_seqs: 64`")
    return {str(key).replace("-", "_"): value for key, value in values.items()}


def _problems(
    error: ValidationError, given: Mapping[str, Any], values: Mapping[str, Any], config: Path | None
) -> Iterator[str]:
    for problem in error.errors(include_url=False):
        field = str(problem["loc"][0]) if problem["loc"] else ""
        if field in given:
            where = flag(field)
        elif field in Settings.model_fields and variable(field) in os.environ:
            where = variable(field)
        else:
            where = f"{field} in {config}" if field in values else field
        if problem["type"] == "extra_forbidden":
            yield f"{where}: unknown setting{nearest(field, Settings.model_fields)}"
        else:
            message = problem["msg"].removeprefix("Value error, ")
            message = re.sub("^Input should be", "must be", message).replace("a valid tuple", "a list")
            shown = "" if problem["type"] == "value_error" else f", got {brief(repr(problem['input']), 80)}"
            yield f"{where}: {message}{shown}"
