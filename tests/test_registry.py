"""Plugins that are wrong in every way: start-up stops with the plugin's name and the fix."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, Field

from framework import ConfigError, PluginError, Provider, Want, hookimpl
from framework.registry import GROUP, Plugins, load_plugins
from framework.settings import Settings


class Admits:
    @hookimpl
    def admit(self, view: Any) -> list[Want]:
        return []


class Options(BaseModel):
    rate: int = Field(1, ge=1)


def provides(*records: Any) -> object:
    class Plugin:
        @hookimpl
        def providers(self) -> list[Any]:
            return list(records)

    return Plugin()


def fails_with(message: str, plugin: object, name: str = "mine") -> str:
    with pytest.raises(PluginError, match=message) as caught:
        Plugins().add(plugin, name)
    assert repr(name) in str(caught.value) and caught.value.plugin == name
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_hook_that_does_not_exist() -> None:
    class Plugin:
        @hookimpl
        def admitt(self) -> None: ...

    assert "admit," in fails_with("admitt.*hooks: ", Plugin())


def test_an_argument_that_does_not_exist() -> None:
    class Plugin:
        @hookimpl
        def admit(self, queue: Any) -> None: ...

    fails_with("queue", Plugin())


def test_an_argument_with_a_default_would_never_get_the_value() -> None:
    class Plugin:
        @hookimpl
        def admit(self, view: Any = None) -> None: ...

    fails_with("'view'.*'admit'.*remove the default", Plugin())


def test_a_wrapper_around_an_event() -> None:
    class Plugin:
        @hookimpl(wrapper=True)
        def step_done(self) -> Any:
            yield

    fails_with("'step_done' is an event", Plugin())


def test_providers_that_raise_or_are_none() -> None:
    class Plugin:
        @hookimpl
        def providers(self) -> list[Provider]:
            raise RuntimeError("boom")

    fails_with("RuntimeError: boom", Plugin())
    fails_with("is no Provider", provides("sjf"))


def test_another_contract_and_a_taken_name() -> None:
    fails_with("contract 2, this framework has 1", provides(Provider("scheduler", "x", Admits, api=2)))
    plugins = Plugins()
    plugins.add(provides(Provider("scheduler", "x", Admits)), "a", "package-a", "1.0")
    with pytest.raises(PluginError, match=r"'x' is claimed by both package-a 1\.0 and package-b 2\.0; uninstall"):
        plugins.add(provides(Provider("scheduler", "x", Admits)), "b", "package-b", "2.0")


def test_a_package_that_fails_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        name, value, dist = "broken", "broken.module", SimpleNamespace(name="broken-package", version="0.3")

        def load(self) -> object:
            raise ImportError("no module named cuda_magic")

    def entry_points(group: str) -> list[Broken]:
        assert group == GROUP
        return [Broken()]

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    with pytest.raises(PluginError, match=r"broken-package 0\.3 failed to import.*cuda_magic.*uninstall broken-pack"):
        load_plugins()


def test_unknown_names_and_options() -> None:
    plugins = Plugins()
    plugins.add(provides(Provider("scheduler", "x", Admits, Options), Provider("scheduler", "y", Admits)), "mine")
    with pytest.raises(ConfigError, match="--scheduler z: no such scheduler; available: x, y"):
        plugins.create("scheduler", "z")
    with pytest.raises(ConfigError, match=r"--scheduler-opt speed: .*'x' has no such option; it has: rate"):
        plugins.create("scheduler", "x", {"speed": 3})
    with pytest.raises(ConfigError, match=r"--scheduler-opt rate: .*greater than or equal to 1"):
        plugins.create("scheduler", "x", {"rate": 0})
    with pytest.raises(ConfigError, match=r"--scheduler-opt rate: .*'y' has no options"):
        plugins.create("scheduler", "y", {"rate": 2})


def test_a_factory_gets_what_it_names_and_is_named_when_it_fails() -> None:
    got: dict[str, Any] = {}

    def factory(options: Options, spec: str) -> object:
        got.update(options=options, spec=spec)
        raise OSError("no disk")

    plugins = Plugins()
    plugins.add(provides(Provider("scheduler", "x", factory, Options)), "mine")
    with pytest.raises(PluginError, match="scheduler 'x' could not be built: OSError: no disk"):
        plugins.create("scheduler", "x", {"rate": 5}, spec="model", settings="unused")
    assert got == {"options": Options(rate=5), "spec": "model"}


@pytest.mark.parametrize(
    "factory, complaint",
    [
        (object, r"--scheduler first: what it made has no hook 'admit' \(is @hookimpl missing\?\)"),
        (Admits, "hook 'admit' needs exactly one implementation, but 'first', 'second' have one"),
    ],
)
def test_there_is_exactly_one_scheduler(factory: type, complaint: str) -> None:
    records = Provider("scheduler", "first", factory), Provider("plugin", "second", factory)
    plugins = load_plugins([("mine", provides(*records))])
    with pytest.raises(PluginError, match=complaint):
        plugins.activate(Settings(scheduler="first", plugin=("second",)), engine=True)


def test_unselected_providers_are_never_built_and_the_first_named_plugin_is_called_first() -> None:
    calls: list[str] = []

    def augmenting(name: str) -> type:
        class Plugin:
            @hookimpl
            def accept(self) -> None:
                calls.append(name)

        return Plugin

    def never() -> object:
        raise AssertionError("built")

    records = [Provider("plugin", name, augmenting(name)) for name in ("a", "b", "c")]
    plugins = load_plugins([("mine", provides(*records, Provider("scheduler", "idle", never)))])
    plugins.activate(Settings(plugin=("c", "a")), engine=True)
    plugins.hook.accept(request=None, view=None)
    assert calls == ["c", "a"]
    with pytest.raises(ConfigError, match=re.escape("--plugin-opt d.x: expected NAME.key=value")):
        load_plugins().activate(Settings(plugin_opt={"d.x": 1}), engine=True)


def test_what_a_hook_raises_names_its_plugin() -> None:
    class Broken:
        @hookimpl
        def executor(self) -> None:
            raise RuntimeError("boom")

        @hookimpl
        def started(self) -> None:
            raise RuntimeError("bang")

    class Fine:
        heard = 0

        @hookimpl
        def started(self) -> None:
            self.heard += 1

    plugins, before, after = Plugins(), Fine(), Fine()
    for name, plugin in (("before", before), ("broken", Broken()), ("after", after)):
        plugins.add(plugin, name)
    with pytest.raises(PluginError, match="plugin 'broken': executor: RuntimeError: boom") as caught:
        plugins.call("executor", settings=None)
    assert caught.value.plugin == "broken"
    faults: list[tuple[str, str, str]] = []
    plugins.notify("started", lambda plugin, hook, exc: faults.append((plugin, hook, str(exc))), engine=None)
    assert faults == [("broken", "started", "bang")]
    assert (before.heard, after.heard) == (1, 1)
