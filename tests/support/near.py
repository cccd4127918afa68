"""Whether numbers are those that they should be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def gaps(found: Mapping[Any, Any], wanted: Mapping[Any, Any], where: str = "") -> dict[Any, float]:
    """By name of a tensor max |found - wanted| / max |wanted|; 0 where both are nothing but zeros, or empty. Fails for
    other names or shapes, and for what is not finite: a comparison with NaN is false, so a maximum passes over it."""
    assert found.keys() == wanted.keys(), where
    out = {}
    for name, one in found.items():
        mine, theirs = np.asarray(one, np.float64), np.asarray(wanted[name], np.float64)
        assert mine.shape == theirs.shape, (where, name)
        assert np.isfinite(mine).all(), f"{where}: {name} is not finite"
        assert np.isfinite(theirs).all(), f"{where}: {name} is not finite where it comes from"
        gap, largest = (float(np.abs(values).max(initial=0.0)) for values in (mine - theirs, theirs))
        out[name] = gap / largest if largest else math.inf if gap else 0.0
    return out


def assert_near(found: Mapping[Any, Any], wanted: Mapping[Any, Any], where: str, relative: float = 1e-5) -> None:
    """Each tensor to `relative` of its own largest number; prints how near the worst one is."""
    by_name = gaps(found, wanted, where)
    worst = max(by_name, key=lambda name: by_name[name])
    print(f"{where}: {by_name[worst]:.1e} ({worst})")
    assert by_name[worst] <= relative, f"{where}: {worst}"
