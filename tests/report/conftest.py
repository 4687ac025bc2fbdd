from __future__ import annotations

import pytest
from report_samples import sample_comparison

from sennit.report import Comparison


@pytest.fixture(scope="session")
def comparison() -> Comparison:
    return sample_comparison()
