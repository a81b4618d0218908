"""Modules that stand in for packages which SGLang imports but, without a GPU, never calls."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Standin(ModuleType):
    """Every name exists in it: a class where it is capitalised, a `Standin` else. As a decorator it changes nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__} has no {name}")
        value = _empty_class(name) if name[0].isupper() else standin(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if len(arguments) == 1 and not options and callable(arguments[0]):
            return arguments[0]
        return lambda decorated: decorated

    def __getitem__(self, item: Any) -> Standin:
        return self

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()


def standin(name: str) -> Standin:
    """The one of that full name."""
    module = sys.modules.get(name)
    if not isinstance(module, Standin):
        module = sys.modules[name] = Standin(name)
    return module


def take_over(name: str, **contents: Any) -> None:
    """Make the module `name`, which is being imported, a stand-in with these contents, and its submodules stand-ins."""
    module = standin_of(sys.modules[name])
    for key, value in contents.items():
        setattr(module, key, value)
    sys.meta_path.insert(0, _Finder(name))


def standin_of(module: ModuleType) -> Standin:
    module.__class__ = Standin
    module.__path__ = []
    assert isinstance(module, Standin)
    return module


class _Members(type):
    """Every capitalised attribute of the class exists, as in an enumeration: its own name."""

    def __getattr__(cls, name: str) -> str:
        if not name.isupper():
            raise AttributeError(f"{cls.__name__} has no {name}")
        return name


def _empty_class(name: str) -> type:
    def remember(self: Any, *arguments: Any, **options: Any) -> None:
        vars(self).update(options)

    return _Members(name, (), {"__init__": remember, "__class_getitem__": classmethod(lambda cls, item: cls)})


class _Finder(MetaPathFinder, Loader):
    def __init__(self, package: str) -> None:
        self._start = package + "."

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(self._start) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return standin(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""
