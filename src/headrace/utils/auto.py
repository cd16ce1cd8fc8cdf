"""Registers headrace's models with transformers' Auto classes, whichever of the two packages is imported first.

`import headrace` does not import transformers, which takes seconds. Instead it registers a stand-in for the
configuration class, which imports `headrace.hf` when a configuration is made; `headrace.hf` registers the real classes.
"""

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

AUTO = "transformers.models.auto.configuration_auto"  # the module of AutoConfig


class ConfigStandIn:
    """Stands in for HeadraceConfig, and returns HeadraceConfigs."""

    model_type = "headrace"

    def __new__(cls, *args, **kwargs):
        HeadraceConfig = import_module("headrace.hf").HeadraceConfig

        return HeadraceConfig(*args, **kwargs)

    @staticmethod
    def from_dict(config_dict, **kwargs):
        HeadraceConfig = import_module("headrace.hf").HeadraceConfig

        return HeadraceConfig.from_dict(config_dict, **kwargs)


class AutoFinder(MetaPathFinder):
    """Finds the module of AutoConfig like the other finders, and registers the stand-in after its execution."""

    def find_spec(self, fullname, path=None, target=None) -> ModuleSpec | None:
        if fullname != AUTO:
            return None
        others = [finder.find_spec for finder in sys.meta_path if finder is not self]
        spec = next((spec for find in others if (spec := find(fullname, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                register(module)
                if self in sys.meta_path:  # not before, as a spec may be searched for and never executed
                    sys.meta_path.remove(self)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register(module: ModuleType) -> None:
    """Registers the stand-in with the AutoConfig of the module."""
    module.AutoConfig.register(ConfigStandIn.model_type, ConfigStandIn)


def install() -> None:
    """Registers the stand-in now if transformers is imported, else when it will be."""
    if AUTO in sys.modules:
        register(sys.modules[AUTO])
    else:
        sys.meta_path.insert(0, AutoFinder())
