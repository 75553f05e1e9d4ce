"""What several test modules share. They import from here, and never from each other."""

import pkgutil

import pytest

# What is asserted here is explained as in tests.
pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)))
