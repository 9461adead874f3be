from __future__ import annotations

import pytest
from support.tiny_architectures import VARIANTS, tiny_architecture

from dtt.model.architecture import Architecture


@pytest.fixture(params=[name for name in VARIANTS if "untied" not in name])
def arch(request: pytest.FixtureRequest) -> Architecture:
    """A tiny architecture; untied heads of the families that tie them matter only to exports."""
    return tiny_architecture(request.param)
