"""Shape annotations are checked while testing (pyproject.toml); a test of our own messages puts that off."""

import jaxtyping
import pytest


@pytest.fixture
def unchecked_shapes():
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
