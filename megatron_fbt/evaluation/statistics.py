"""Means with standard errors, paired differences, quartiles."""

import math
import statistics
from typing import Any, Dict, List, Optional, Sequence


def mean_and_error(values: Sequence[float]) -> Dict[str, Any]:
    """Mean, its standard error (None for fewer than two values) and their number."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"value": statistics.fmean(values), "stderr": error, "n": len(values)}


def paired(base: Dict[Any, float], other: Dict[Any, float]) -> Optional[Dict[str, Any]]:
    """Mean of other - base over the keys that both have, with the standard error of that mean; None without any."""
    both = [key for key in base if key in other]
    return mean_and_error([other[key] - base[key] for key in both]) if both else None


def quartiles(values: List[int]) -> Optional[Dict[str, float]]:
    """Mean, quartiles (with interpolation) and number of values; None without any."""
    if not values:
        return None
    number, mean = len(values), statistics.fmean(values)
    low, middle, high = statistics.quantiles(values * 2 if number == 1 else values, n=4, method="inclusive")
    return {"mean": mean, "q1": low, "median": middle, "q3": high, "n": number}
