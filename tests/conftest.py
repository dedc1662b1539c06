"""Fixtures that several test files use."""

import importlib
import sys

import pytest
import torch

pytest.register_assert_rewrite("tests.looks")

# Scripts of test_typing, the second of which is full of mistakes.
collect_ignore = ["typing"]

# The tests' tensors are small: with several threads most of the time goes into waiting for one another.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def unchecked():
    """The package as a user imports it, without the shape checks that the tests add.

    Shape checks would catch bad input before the package's own words do, and it is those words that tests of errors
    are about.
    """
    checked = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "gramlin"}
    finders = sys.meta_path[:]
    sys.meta_path[:] = [finder for finder in finders if "jaxtyping" not in type(finder).__module__]
    try:
        package = importlib.import_module("gramlin")
        for name in [*package._MODULES, *package._MODULE_OF]:
            setattr(package, name, getattr(package, name))  # now, since a later look-up would find the checked modules
        importlib.import_module("gramlin.chapters.features")
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "gramlin"]:
            del sys.modules[name]
        sys.modules.update(checked)
        sys.meta_path[:] = finders
    return package
