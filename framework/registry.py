"""Plugins: found through entry points, checked when they load, selected by name.

Every entry point of the group "framework.plugins" is a module or object with hook implementations. Installing a package
only makes names available; a provider is built when a setting selects it.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

import pluggy
from pydantic import BaseModel, ValidationError

from .defaults import Defaults
from .errors import ConfigError, FrameworkError, PluginError, brief
from .hookspecs import EVENTS, HOOKS, PROJECT, Hooks
from .settings import Settings, option_flag, selector
from .types import Provider

T = TypeVar("T")
GROUP = "framework.plugins"
API = 1
"""Major number of the contract; a provider that was written for another one is refused."""

_WORDS = {"kernel": ("auto",), "model": ("auto",), "tool_parser": ("auto", "none")}
"""What may stand where the name of a provider does."""


class Plugins:
    """All loaded plugins of one process, and the hook relay that calls the active ones."""

    def __init__(self) -> None:
        self._pm = pluggy.PluginManager(PROJECT)
        self._pm.add_hookspecs(Hooks)
        self._providers: dict[tuple[str, str], Provider] = {}
        self._origin: dict[tuple[str, str], tuple[str, str]] = {}
        self.manifest: dict[str, str] = {}
        """Version of every distribution that plugins came from: engine and server refuse to differ."""
        self.hook: Any = self._pm.hook

    # Loading

    def add(self, plugin: object, name: str, distribution: str = "", version: str = "") -> None:
        """Register a plugin and collect its providers. Raises `PluginError` naming it and the fix."""
        self._register(plugin, name)
        if distribution:
            self.manifest[distribution] = version
        impl = getattr(plugin, "providers", None)
        if impl is None or not getattr(impl, f"{PROJECT}_impl", None):
            return
        try:
            provided = list(impl())
        except (Exception, SystemExit) as exc:  # whatever a plugin raises: the user has to know whose it was
            message = f"plugin {name!r}: providers() failed: {type(exc).__name__}: {exc}"
            raise PluginError(f"{message}; fix or uninstall {distribution or name}", name) from exc
        for provider in provided:
            if not isinstance(provider, Provider):
                raise PluginError(f"plugin {name!r}: providers() gave {provider!r}, which is no Provider", name)
            key = (provider.kind, provider.name)
            if provider.api != API:
                raise PluginError(
                    f"plugin {name!r}: {provider.kind} {provider.name!r} is written for contract {provider.api}, "
                    f"this framework has {API}; install a matching version of {distribution or name}",
                    name,
                )
            if key in self._providers:
                raise PluginError(
                    f"{provider.kind} {provider.name!r} is claimed by both {' '.join(self._origin[key])} and "
                    f"{distribution or name} {version}; uninstall one of them",
                    name,
                )
            self._providers[key] = provider
            self._origin[key] = (distribution or name, version)

    def _register(self, plugin: object, name: str) -> None:
        for hook in HOOKS:
            impl = getattr(plugin, hook, None)
            if impl is None or not getattr(impl, f"{PROJECT}_impl", None):
                continue
            options = getattr(impl, f"{PROJECT}_impl")
            if hook in (*EVENTS, "prepare", "routes") and (options["wrapper"] or options["hookwrapper"]):
                what = "is an event" if hook in EVENTS else "is called for each plugin on its own"
                raise PluginError(f"plugin {name!r}: {hook!r} {what}: implement it without a wrapper", name)
            for parameter in inspect.signature(impl).parameters.values():
                if parameter.default is not inspect.Parameter.empty:
                    raise PluginError(
                        f"plugin {name!r}: argument {parameter.name!r} of hook {hook!r} has a default, so it would "
                        "never get the value; remove the default",
                        name,
                    )
        try:
            self._pm.register(plugin, name)
            self._pm.check_pending()
        except (pluggy.PluginValidationError, ValueError) as exc:
            if self._pm.is_registered(plugin):
                self._pm.unregister(plugin)
            known = f"hooks: {', '.join(HOOKS)}" if "unknown hook" in str(exc) else "see framework.hookspecs"
            raise PluginError(f"plugin {name!r}: {' '.join(str(exc).split())} ({known})", name) from exc

    # Selection

    def providers(self, kind: str | None = None) -> list[Provider]:
        """In the order in which they were loaded."""
        return [p for p in self._providers.values() if kind in (None, p.kind)]

    def origin(self, provider: Provider) -> tuple[str, str]:
        """(distribution, version) that a provider came from."""
        return self._origin[provider.kind, provider.name]

    def get(self, kind: str, name: str) -> Provider:
        """Raises `ConfigError` listing the valid names."""
        provider = self._providers.get((kind, name))
        if provider is None:
            names = ", ".join([*_WORDS.get(kind, ()), *sorted(p.name for p in self.providers(kind))])
            what = f"{selector(kind)} {name}: no such {kind}" if name else f"{selector(kind)}: no name is given"
            raise ConfigError(f"{what}; available: {names or 'none is installed'}")
        return provider

    def create(self, kind: str, name: str, options: Mapping[str, Any] | None = None, **context: Any) -> Any:
        """Build a provider: check `options` against its model and pass what its factory names.

        Raises `ConfigError` for bad options and `PluginError` for a factory that fails.
        """
        provider = self.get(kind, name)
        context["options"] = self._options(provider, options or {})
        try:
            parameters = inspect.signature(provider.factory).parameters.values()
        except ValueError:  # some builtins have no signature: they take nothing from us
            parameters = {}.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            arguments = context
        else:
            arguments = {p.name: context[p.name] for p in parameters if p.name in context}
        try:
            return provider.factory(**arguments)
        except FrameworkError:
            raise
        except (Exception, SystemExit) as exc:
            raise PluginError(f"{kind} {name!r} could not be built: {type(exc).__name__}: {exc}", name) from exc

    @staticmethod
    def _options(provider: Provider, options: Mapping[str, Any]) -> Any:
        def flag(option: str) -> str:
            return option_flag(provider.kind, provider.name, option)

        if provider.options is None:
            for key in options:
                raise ConfigError(f"{flag(key)}: {provider.kind} {provider.name!r} has no options")
            return None
        if not (isinstance(provider.options, type) and issubclass(provider.options, BaseModel)):
            message = f"{provider.kind} {provider.name!r}: options must be a pydantic model, not {provider.options!r}"
            raise PluginError(message, provider.name)
        known = provider.options.model_fields
        for key in options:
            if key not in known:
                raise ConfigError(
                    f"{flag(key)}: {provider.kind} {provider.name!r} has no such option; "
                    f"it has: {', '.join(known) or 'none'}"
                )
        try:
            return provider.options(**options)
        except ValidationError as exc:
            first = exc.errors()[0]
            said = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
            given = brief(repr(first["input"]), 80)
            raise ConfigError(f"{flag('.'.join(map(str, first['loc'])))}: {said}, got {given}") from exc

    # Activation

    def activate(self, settings: Settings, *, engine: bool) -> None:
        """Register the selected scheduler and sampler (engine side) and the augmenting plugins (both sides).

        The plugin named first is called first, and before the scheduler. Raises `PluginError` unless there is exactly
        one `admit` and one `sample` beside the core's defaults.
        """
        names = list(dict.fromkeys(settings.plugin))
        if settings.otlp_endpoint and "otel" not in names:
            names.append("otel")
        always = ("prometheus", "grammar") if engine else ("prometheus",)
        names += [name for name in always if name not in names and ("plugin", name) in self._providers]
        options: dict[str, dict[str, Any]] = {name: {} for name in names}
        for key, value in settings.plugin_opt.items():
            name, _, option = key.partition(".")
            if name not in options or not option:
                raise ConfigError(f"--plugin-opt {key}: expected NAME.key=value with NAME one of {', '.join(names)}")
            options[name][option] = value
        if engine:
            for kind, name, opts in (
                ("scheduler", settings.scheduler, settings.scheduler_opt),
                ("sampler", settings.sampler, settings.sampler_opt),
            ):
                self._select(kind, name, self.create(kind, name, opts, settings=settings))
        for name in reversed(names):
            self._select("plugin", name, self.create("plugin", name, options[name], settings=settings))
        if engine:
            for hook in ("admit", "sample"):
                claims = [i for i in getattr(self.hook, hook).get_hookimpls() if not (i.wrapper or i.hookwrapper)]
                claims = [i for i in claims if not isinstance(i.plugin, Defaults)]
                if not claims:
                    chosen = f"--scheduler {settings.scheduler}" if hook == "admit" else f"--sampler {settings.sampler}"
                    raise PluginError(f"{chosen}: what it made has no hook {hook!r} (is @hookimpl missing?)")
                if len(claims) != 1:
                    who = ", ".join(repr(i.plugin_name) for i in claims)
                    raise PluginError(f"hook {hook!r} needs exactly one implementation, but {who} have one")

    def _select(self, kind: str, name: str, plugin: object) -> None:
        """Register a provider's object, under the name that users know it by where that is not ambiguous."""
        self._register(plugin, f"{kind} {name}" if self._pm.has_plugin(name) else name)

    def active(self, kind: type[T]) -> list[T]:
        """Registered plugin objects of a class."""
        return [p for p in self._pm.get_plugins() if isinstance(p, kind)]

    def call(self, hook: str, expect: type | None = None, **arguments: Any) -> Any:
        """Call a hook; what a plugin raises becomes a `PluginError` that names it, errors for the user stay.

        So does an answer that is no `expect`.
        """
        try:
            answer = getattr(self.hook, hook)(**arguments)
            if expect is not None and not isinstance(answer, expect):
                raise TypeError(f"answered {answer!r}, which is no {expect.__name__}")
        except FrameworkError:
            raise
        except (Exception, SystemExit) as exc:  # anything a plugin can raise: named, for whoever has to answer for it
            plugin = self.blame(hook, exc)
            raise PluginError(f"plugin {plugin!r}: {hook}: {type(exc).__name__}: {exc}", plugin) from exc
        return answer

    def notify(self, hook: str, on_fault: Callable[[str, str, BaseException], None], **arguments: Any) -> None:
        """Call every implementation of an event hook, each on its own: one that raises harms no other.

        `on_fault(plugin, hook, exception)` is told of each failure.
        """
        for impl in reversed(getattr(self.hook, hook).get_hookimpls()):
            try:
                impl.function(*(arguments[name] for name in impl.argnames))
            except (Exception, SystemExit) as exc:  # noqa: BLE001 - a plugin may raise anything; the others still run
                on_fault(str(impl.plugin_name), hook, exc)

    def each(self, hook: str, **arguments: Any) -> Iterator[tuple[str, Any]]:
        """What every implementation of a hook answers, each called on its own, with the plugin's name; what it raises
        stands for an answer, and None is left out."""
        for impl in reversed(getattr(self.hook, hook).get_hookimpls()):
            try:
                answer = impl.function(*(arguments[name] for name in impl.argnames))
            except (Exception, SystemExit) as exc:  # noqa: BLE001 - a plugin may raise anything; the others still run
                answer = exc
            if answer is not None:
                yield str(impl.plugin_name), answer

    def blame(self, hook: str, exc: BaseException) -> str:
        """Name of the plugin in whose code a call of `hook` failed; all that have the hook if it cannot be told."""
        impls = [i for i in getattr(self.hook, hook).get_hookimpls() if not isinstance(i.plugin, Defaults)]
        files = {i.function.__code__.co_filename: i.plugin_name for i in impls if hasattr(i.function, "__code__")}
        tb: TracebackType | None = exc.__traceback__
        while tb is not None:
            code = tb.tb_frame.f_code
            for impl in impls:
                if getattr(impl.function, "__code__", None) is code:
                    return str(impl.plugin_name)
            if code.co_filename in files:  # a generator's frame, or a helper beside the hook
                return str(files[code.co_filename])
            tb = tb.tb_next
        return ", ".join(str(i.plugin_name) for i in impls if not (i.wrapper or i.hookwrapper)) or "core"


def load_plugins(extra: Iterable[tuple[str, object]] = ()) -> Plugins:
    """Load every installed plugin, and those of `extra` (name, object), in a fresh `Plugins`.

    Nothing is active yet but providers and the core's defaults: see `Plugins.activate`.
    """
    plugins = Plugins()
    plugins.add(Defaults(plugins), "core", "framework", importlib.metadata.version("framework"))
    for entry in importlib.metadata.entry_points(group=GROUP):
        distribution = entry.dist.name if entry.dist else "unknown"
        version = entry.dist.version if entry.dist else ""
        try:
            plugin = entry.load()
        except (Exception, SystemExit) as exc:  # whatever an import can raise: the user has to know whose it was
            raise PluginError(
                f"plugin {entry.name!r} of {distribution} {version} failed to import ({entry.value}): "
                f"{type(exc).__name__}: {exc}; fix or uninstall {distribution}",
                entry.name,
            ) from exc
        plugins.add(plugin, f"{distribution}:{entry.name}", distribution, version)
    for name, plugin in extra:
        plugins.add(plugin, name)
    return plugins
