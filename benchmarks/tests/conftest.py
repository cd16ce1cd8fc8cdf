"""The fixtures and settings of the library's own tests."""

pytest_plugins = ["tests.conftest"]
