"""The probe: its optimum, what it finds, what it cannot find, and that groups do not leak."""

import pytest
import torch
import torch.nn.functional as F

from megatron_fbt.analysis.probe import cross_validate, fit_logistic, fold_numbers
from megatron_fbt.errors import DataError


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_linear_fact_is_found():
    features = normal(600, 8) * torch.tensor([1.0, 50, 0.01, 1, 1, 1, 1, 0]) + 3
    classes = (features[:, 0] > 3).long()
    result = cross_validate(features, classes, torch.arange(600) % 5, 1.0)
    assert result.accuracy > 0.97 and result.majority == pytest.approx(0.5, abs=0.1)
    assert len(result.folds) == 5 and result.accuracy == pytest.approx(sum(result.folds) / 5)
    assert result.right.float().mean().item() == pytest.approx(result.accuracy)


def test_random_labels_are_at_the_level_of_the_majority():
    classes = (torch.rand(2000, generator=torch.Generator().manual_seed(1)) < 0.3).long()
    result = cross_validate(normal(2000, 6), classes, torch.arange(2000) % 4, 1.0)
    assert result.majority == pytest.approx(0.7, abs=0.03)
    assert result.accuracy == pytest.approx(result.majority, abs=0.02)


def test_the_fit_is_the_minimum_of_the_penalised_likelihood():
    features, classes, l2 = normal(200, 3).double(), torch.arange(200) % 3, 2.0
    predict = fit_logistic(features, classes, 3, l2)
    x = (features - features.mean(0)) / features.std(0, unbiased=False)
    w = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    b = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    for _ in range(3000):
        loss = F.cross_entropy(x @ w.T + b, classes, reduction="sum") + l2 / 2 * w.square().sum()
        gw, gb = torch.autograd.grad(loss, (w, b))
        with torch.no_grad():
            w -= 0.005 * gw
            b -= 0.005 * gb
    assert gw.abs().max() < 1e-6
    new = normal(500, 3, seed=4).double()
    scores = ((new - features.mean(0)) / features.std(0, unbiased=False)) @ w.T + b
    assert torch.equal(predict(new), scores.argmax(-1))


def test_groups_cannot_leak():
    """The label is a coin for each group and the features tell the group: only leaked groups would be predictable."""
    groups = torch.arange(40).repeat_interleave(20)
    coin = torch.rand(40, generator=torch.Generator().manual_seed(2)) < 0.5
    features, classes = F.one_hot(groups).float(), coin[groups].long()
    grouped = cross_validate(features, classes, fold_numbers(groups, 5, seed=0), 1.0)
    assert grouped.accuracy <= 0.6
    leaking = cross_validate(features, classes, torch.arange(800) % 5, 1.0)
    assert leaking.accuracy == 1.0


@pytest.mark.parametrize("number_of_groups, folds", [(7, 3), (5, 5), (3, 5)])
def test_every_group_is_in_one_fold_and_folds_are_even(number_of_groups, folds):
    groups = torch.arange(60) % number_of_groups * 10
    found = fold_numbers(groups, folds, seed=1)
    by_group = [set(found[groups == group].tolist()) for group in groups.unique()]
    assert all(len(inside) == 1 for inside in by_group)
    sizes = torch.tensor([min(inside) for inside in by_group]).bincount()
    assert len(sizes) == min(folds, number_of_groups) and sizes.max() - sizes.min() <= 1


def test_one_group_is_refused():
    with pytest.raises(DataError, match="one group"):
        fold_numbers(torch.zeros(9, dtype=torch.long), 5, 0)


def test_a_class_that_a_fold_has_alone_is_counted_as_wrong():
    classes = torch.tensor([0] * 20 + [1] * 20 + [2] * 5)
    folds = torch.tensor([0, 1] * 20 + [0] * 5)
    features = F.one_hot(classes).float()
    result = cross_validate(features, classes, folds, 1.0)
    assert result.accuracy == pytest.approx(40 / 45) and not result.right[40:].any()
