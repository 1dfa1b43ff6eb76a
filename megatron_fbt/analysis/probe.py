"""Linear probes: multinomial logistic regression with cross-validation over whole groups."""

from dataclasses import dataclass
from typing import Callable, List

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fbt.errors import DataError

ITERATIONS = 300
"""Most steps of the optimizer (L-BFGS)."""


@dataclass
class ProbeResult:
    """Accuracies on data that the probe was not fitted to.

    Attributes:
        accuracy: Share of all positions that are right, each predicted once.
        majority: The same of always naming the training folds' most frequent class.
        folds: accuracy of each fold.
        right: [n] bool, by position.
    """

    accuracy: float
    majority: float
    folds: List[float]
    right: Tensor


def fold_numbers(groups: Tensor, folds: int, seed: int) -> Tensor:
    """Deal groups into folds: [n] group of each position -> [n] fold, equal within a group.

    Args:
        groups: [n] whole numbers.
        folds: Most folds; fewer if there are fewer groups.
        seed: Of the deal.

    Raises:
        DataError: There is only one group.
    """
    different, index = groups.unique(return_inverse=True)
    if len(different) < 2:
        raise DataError("all labelled tokens are of one group: give at least two sequences or groups")
    order = torch.randperm(len(different), generator=torch.Generator().manual_seed(seed))
    fold_of_group = torch.empty_like(order)
    fold_of_group[order] = torch.arange(len(different)) % min(folds, len(different))
    return fold_of_group[index]


def fit_logistic(features: Tensor, classes: Tensor, number_of_classes: int, l2: float) -> Callable[[Tensor], Tensor]:
    """Fit a linear map to class scores; minimises the sum of NLL plus l2 / 2 times the squared weights.

    Features are standardised with their own mean and deviation, which the returned function keeps.

    Args:
        features: [n, D].
        classes: [n].
        number_of_classes: C.
        l2: Weight of the penalty; the bias is free.

    Returns:
        [m, D] -> [m] predicted classes.
    """
    mean, deviation = features.mean(0), features.std(0, unbiased=False)
    deviation = torch.where(deviation > 1e-6 * deviation.max().clamp(min=1e-30), deviation, torch.ones_like(deviation))
    x = (features - mean) / deviation
    weight = torch.zeros(number_of_classes, x.shape[1], dtype=x.dtype, device=x.device, requires_grad=True)
    bias = torch.zeros(number_of_classes, dtype=x.dtype, device=x.device, requires_grad=True)
    search = {"line_search_fn": "strong_wolfe", "tolerance_grad": 1e-6, "tolerance_change": 1e-9}
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=ITERATIONS, **search)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(F.linear(x, weight, bias), classes) + l2 / (2 * len(x)) * weight.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    return lambda new: F.linear((new - mean) / deviation, weight, bias).argmax(-1)


def cross_validate(
    features: Tensor, classes: Tensor, folds: Tensor, l2: float, on_fold: Callable[[], None] = lambda: None
) -> ProbeResult:
    """Predict each fold with a probe fitted to the others.

    Args:
        features: [n, D].
        classes: [n], 0 .. C-1.
        folds: [n], from fold_numbers.
        l2: See fit_logistic.
        on_fold: Called after each fold.
    """
    number_of_classes = int(classes.max()) + 1
    right, by_majority = torch.zeros(len(classes), dtype=torch.bool), torch.zeros(len(classes), dtype=torch.bool)
    accuracies = []
    for fold in folds.unique():
        test = folds == fold
        fitted_to = classes[~test]
        inside = test.to(features.device)
        predict = fit_logistic(features[~inside], fitted_to.to(features.device), number_of_classes, l2)
        with torch.no_grad():
            right[test] = predict(features[inside]).cpu() == classes[test]
        by_majority[test] = classes[test] == fitted_to.bincount().argmax()
        accuracies.append(right[test].float().mean().item())
        on_fold()
    return ProbeResult(right.float().mean().item(), by_majority.float().mean().item(), accuracies, right)
