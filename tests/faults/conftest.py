"""Fault tests count the processes that are left, so no warm pool of other files may be among them."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_warm_pools(pools):
    """End the pools that earlier files left warm."""
    pools.close()
