from __future__ import annotations

import pytest
from support.tiny_architectures import VARIANTS, tiny_architecture

from dtt.model.architecture import Architecture


@pytest.fixture(params=VARIANTS)
def arch(request: pytest.FixtureRequest) -> Architecture:
    return tiny_architecture(request.param)
