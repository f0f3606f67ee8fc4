from typing import Any, TypeAlias

import numpy as np

__all__ = ["copy_pairs"]

Pair: TypeAlias = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]

def copy_pairs(pairs: list[Pair], /) -> list[Pair]: ...
