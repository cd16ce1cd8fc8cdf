"""transformers' Auto classes know the models of headrace, whichever of the two packages is imported first.

transformers takes seconds to import, so `import headrace` does not import it; and while transformers is imported, its
models cannot be. What is registered is therefore a stand-in for the configuration, which needs nothing: whoever asks it
for a configuration imports `headrace.hf`, which registers the real classes.
"""

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

AUTO = "transformers.models.auto.configuration_auto"  # the module of AutoConfig


class ConfigStandIn:
    """Makes HeadraceConfigs."""

    model_type = "headrace"

    def __new__(cls, *args, **kwargs):
        HeadraceConfig = import_module("headrace.hf").HeadraceConfig

        return HeadraceConfig(*args, **kwargs)

    @staticmethod
    def from_dict(config_dict, **kwargs):
        HeadraceConfig = import_module("headrace.hf").HeadraceConfig

        return HeadraceConfig.from_dict(config_dict, **kwargs)


class AutoFinder(MetaPathFinder):
    """Finds the module of AutoConfig as all others would, and registers the stand-in when it has been executed."""

    def find_spec(self, fullname, path=None, target=None) -> ModuleSpec | None:
        if fullname != AUTO:
            return None
        sys.meta_path.remove(self)
        found = find_spec(fullname)
        if found is not None and found.loader is not None:
            execute = found.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                register(module)

            found.loader.exec_module = exec_module  # type: ignore[method-assign]
        return found


def register(module: ModuleType) -> None:
    module.AutoConfig.register(ConfigStandIn.model_type, ConfigStandIn)


def install() -> None:
    """Register now where transformers is there, or else when it comes."""
    if AUTO in sys.modules:
        register(sys.modules[AUTO])
    else:
        sys.meta_path.insert(0, AutoFinder())
