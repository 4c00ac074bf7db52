"""The loss over all paths and the best path, against enumeration."""

import itertools

import pytest
import torch

from decoding.dag_definition import log_likelihood, path_log_prob, paths, random_graph
from hasten.decoding import dag_sweeps
from hasten.decoding.dag_loss import _prepared, best_path, dag_loss, feasible, words_carried

SHAPES = [(2, 0), (3, 0), (3, 1), (4, 1), (4, 2), (5, 3), (6, 1), (6, 2), (6, 3), (6, 4), (8, 3)]


def lengths(*values):
    return torch.tensor(values, dtype=torch.int64)


def emitted(words, target):
    """(U, L): log probability of every target word at every vertex."""
    return words[:, list(target)].T


def single(words, links, target):
    return emitted(words, target)[None], links[None], lengths(len(links)), lengths(len(target))


@pytest.mark.parametrize(("n_vertices", "n_words"), SHAPES)
def test_loss_and_gradients_equal_the_sum_over_all_paths(n_vertices, n_words):
    words, links = random_graph(n_vertices, 3, seed=n_words)
    for target in list(itertools.product(range(3), repeat=n_words))[::5]:
        emissions = emitted(words, target).clone().requires_grad_()
        edges = links.clone().requires_grad_()
        table = torch.zeros(n_vertices, n_words, dtype=torch.float64) + emissions.T  # a word of its own a place
        expected = -log_likelihood(table, edges, tuple(range(n_words)))
        wanted = torch.autograd.grad(expected, (emissions, edges), allow_unused=True)
        loss = dag_loss(emissions[None], edges[None], lengths(n_vertices), lengths(n_words))
        found = torch.autograd.grad(loss.sum(), (emissions, edges))
        torch.testing.assert_close(loss[0], expected, rtol=1e-12, atol=1e-12)
        for one, other in zip(found, wanted, strict=True):
            other = torch.zeros_like(one) if other is None else other
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_the_likelihoods_of_all_outputs_sum_to_one():
    words, links = random_graph(5, 2)
    total = 0.0
    for n_words in range(4):
        for target in itertools.product(range(2), repeat=n_words):
            total += dag_loss(*single(words, links, target)).neg().exp().item()
    assert total == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(("n_vertices", "n_words"), [(1, 0), (1, 1), (2, 1), (4, 3), (5, 5)])
def test_a_target_without_a_path_costs_infinity_and_has_no_gradient(n_vertices, n_words):
    words, links = random_graph(max(2, n_vertices), 3)
    words, links = words[:n_vertices].clone().requires_grad_(), links[:n_vertices, :n_vertices].clone().requires_grad_()
    arguments = single(words, links, (1,) * n_words)
    assert not feasible(*arguments[2:]).any()
    loss = dag_loss(*arguments)
    assert loss.tolist() == [torch.inf]
    gradients = torch.autograd.grad(loss.sum(), (words, links), allow_unused=True)
    assert not any(g.any() or g.isnan().any() for g in gradients if g is not None)


@pytest.mark.parametrize(("n_vertices", "n_words"), list(itertools.product(range(1, 7), range(6))))
def test_feasible_are_targets_for_which_there_is_a_path(n_vertices, n_words):
    exists = any(True for _ in paths(n_vertices, n_words))
    assert feasible(lengths(n_vertices), lengths(n_words)).item() is exists
    assert (n_words <= words_carried(n_vertices)) is exists


@pytest.mark.parametrize(("n_vertices", "n_words"), SHAPES)
def test_no_path_is_more_probable_than_the_best_path(n_vertices, n_words):
    words, links = random_graph(n_vertices, 3, seed=7)
    for target in list(itertools.product(range(3), repeat=n_words))[::4]:
        path = tuple(best_path(*single(words, links, target))[0].tolist())
        every = {one: path_log_prob(words, links, one, target).item() for one in paths(n_vertices, n_words)}
        assert every[path] == pytest.approx(max(every.values()), abs=1e-12)


CASES = [(6, (0, 1, 2)), (3, (1,)), (2, ()), (4, (2, 2, 2)), (6, (0, 0, 1, 2)), (5, ())]


def batched(filler, dtype=torch.float64):
    """The cases side by side; padding holds `filler`."""
    emissions = torch.full((len(CASES), 5, 8), filler, dtype=dtype)
    links = torch.full((len(CASES), 8, 8), filler, dtype=dtype)
    for i, (n, target) in enumerate(CASES):
        words, edges = random_graph(n, 3, seed=i)
        emissions[i, : len(target), :n] = emitted(words, target)
        links[i, :n, :n] = edges
    sizes = lengths(*(n for n, _ in CASES)), lengths(*(len(target) for _, target in CASES))
    return emissions.requires_grad_(), links.requires_grad_(), *sizes


@pytest.mark.parametrize("filler", [0.0, -torch.inf, torch.nan, 1e30])
def test_a_batch_gives_what_its_rows_give_alone_whatever_the_padding_holds(filler):
    emissions, links, *_ = arguments = batched(filler)
    losses, routes = dag_loss(*arguments), best_path(*arguments)
    gradients = torch.autograd.grad(losses[losses.isfinite()].sum(), (emissions, links))
    for i, (n, target) in enumerate(CASES):
        words, edges = random_graph(n, 3, seed=i)
        alone = [part.clone().requires_grad_() for part in single(words, edges, target)[:2]]
        loss = dag_loss(*alone, lengths(n), lengths(len(target)))
        torch.testing.assert_close(losses[i], loss[0])
        expected = best_path(*alone, lengths(n), lengths(len(target)))[0]
        assert torch.equal(routes[i, : len(target)], expected)
        assert not routes[i, len(target) :].any()
        if loss.isfinite():
            wanted = torch.autograd.grad(loss.sum(), alone)
            torch.testing.assert_close(gradients[0][i, : len(target), :n], wanted[0][0])
            torch.testing.assert_close(gradients[1][i, :n, :n], wanted[1][0])
        assert not gradients[0][i, len(target) :].any()
        assert not gradients[0][i, :, n:].any()
        assert not gradients[1][i, n:].any()
        assert not gradients[1][i, :, n:].any()


def test_an_infeasible_row_leaves_the_gradients_of_the_others_as_they_are():
    emissions, links, *sizes = batched(0.0)
    dag_loss(emissions, links, *sizes).sum().backward()
    assert emissions.grad.isfinite().all()
    assert links.grad.isfinite().all()
    assert emissions.grad[0].any()


def test_extreme_scores_are_exact_in_float32_and_gradients_finite():
    words, links = random_graph(7, 3, scale=60.0)
    for target in [(0, 1, 2, 0, 1), (2, 2), ()]:
        exact = dag_loss(*single(words, links, target))
        emissions, edges, *sizes = single(words.float(), links.float(), target)
        emissions.requires_grad_(), edges.requires_grad_()
        loss = dag_loss(emissions, edges, *sizes)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, exact.float(), rtol=1e-5, atol=1e-4)
        loss.sum().backward()
        assert emissions.grad.isfinite().all()
        assert edges.grad.isfinite().all()


def test_half_precision_scores_are_summed_in_float32_and_get_their_own_gradients():
    words, links = random_graph(8, 3)
    emissions, edges, *sizes = single(words.bfloat16(), links.bfloat16(), (0, 1, 1))
    emissions.requires_grad_(), edges.requires_grad_()
    loss = dag_loss(emissions, edges, *sizes)
    torch.testing.assert_close(loss, dag_loss(emissions.float(), edges.float(), *sizes))
    loss.sum().backward()
    assert edges.grad.dtype == emissions.grad.dtype == torch.bfloat16
    assert edges.grad.isfinite().all()


def test_a_long_target_in_a_long_graph_keeps_its_digits():
    words, links = random_graph(300, 6, scale=4.0)
    target = tuple(torch.randint(0, 6, (90,), generator=torch.Generator().manual_seed(6)).tolist())
    exact = dag_loss(*single(words, links, target))
    torch.testing.assert_close(
        dag_loss(*single(words.float(), links.float(), target)), exact.float(), rtol=1e-5, atol=0
    )
    edges = links.float().requires_grad_()
    dag_loss(*single(words.float(), edges, target)).sum().backward()
    assert -edges.grad.sum().item() == pytest.approx(91, rel=1e-4), "every path has as many edges"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows are computed in logarithms."""
    seen: list[int] = []

    own = dag_sweeps.by_logarithms

    def counted(*given):
        seen.append(len(given[0]))
        return own(*given)

    monkeypatch.setattr(dag_sweeps, "by_logarithms", counted)
    return seen


@pytest.mark.parametrize("scale", [1.0, 6.0, 40.0, 300.0])
def test_products_are_exact_wherever_they_say_so(scale):
    exact = []
    for n_vertices, n_words in [(12, 3), (12, 10), (40, 37), (40, 10), (5, 0)]:
        words, links = random_graph(n_vertices, 4, seed=n_words, scale=scale)
        target = tuple(i % 4 for i in range(n_words))
        given = (part.float() if part.is_floating_point() else part for part in single(words, links, target))
        emissions, edges, *sizes = given
        given = (*_prepared(emissions, edges, *sizes), *sizes)
        found, holds = dag_sweeps.scaled(*given)
        exact.append(bool(holds))
        if holds:
            for one, other in zip(found, dag_sweeps.by_logarithms(*(_doubled(x) for x in given)), strict=True):
                torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)
    assert scale > 6 or all(exact)
    assert scale < 300 or not all(exact)


def _doubled(x):
    return x.double() if x.is_floating_point() else x


def test_only_rows_beyond_what_products_can_hold_are_computed_in_logarithms(asked):
    parts = [random_graph(6, 3, seed=seed) for seed in range(3)]
    emissions = torch.stack([emitted(words, (0, 2)) for words, _ in parts])
    links, sizes = torch.stack([links for _, links in parts]), (lengths(6, 6, 6), lengths(2, 2, 2))
    emissions[1] -= 2000.0  # alike for all vertices: no more than a scale
    dag_loss(emissions, links, *sizes)
    assert asked == []
    links[1, 0, 1] = -1500.0  # a way in that is lost beside the others, and that the last word asks for
    emissions[1, 1, 3:] = -9000.0
    found = dag_loss(emissions, links, *sizes)
    assert asked == [1]
    expected = torch.stack([-_marginal(emissions[row], links[row]) for row in range(3)])
    torch.testing.assert_close(found, expected)


def _marginal(emissions, links):
    """For two words and six vertices."""
    every = [links[0, a] + emissions[0, a] + links[a, b] + emissions[1, b] + links[b, 5] for a, b in paths(6, 2)]
    return torch.stack(every).logsumexp(0)


def test_there_is_no_second_derivative():
    words, links = random_graph(5, 3)
    links.requires_grad_()
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(dag_loss(*single(words, links, (1, 2))).sum(), links, create_graph=True)


def test_shapes_that_disagree_are_refused():
    words, links = random_graph(5, 3)
    emissions, links, n, m = single(words, links, (1, 2))
    with pytest.raises(ValueError, match="vertices span 6 to 6"):
        dag_loss(emissions, links, n + 1, m)
    with pytest.raises(ValueError, match="target_lengths span 3 to 3"):
        dag_loss(emissions, links, n, m + 1)
    with pytest.raises(ValueError, match="no vertices"):
        dag_loss(emissions[..., :0], links[:, :0, :0], n * 0, m)
