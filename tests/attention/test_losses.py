"""Losses of mechanisms reach the objective, once."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hasten.attention import FullSpec, RoutingSpec, attention_losses, multi_head
from hasten.attention.losses import together
from hasten.data.batch import pair_batch
from hasten.nn.loss import LossTerm


def layer(**settings):
    torch.manual_seed(0)
    return multi_head(8, 2, RoutingSpec(clusters=2, **settings)).train()


X = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(0))


def test_losses_of_all_layers_within_are_gathered():
    model = torch.nn.Sequential(layer(commitment=0.5), multi_head(8, 2, FullSpec()), layer(commitment=0.25))
    with attention_losses() as losses:
        model(X)
    assert [term.weight for term in losses] == [0.5, 0.25]
    assert all(int(term.count) == 2 * 2 * 7 and term.sum.requires_grad for term in losses)
    with attention_losses() as losses:
        model(X)
    assert len(losses) == 2, "each block gathers its own"


def test_outside_in_evaluation_and_without_gradients_there_are_none():
    model = layer()
    model(X)
    with attention_losses() as losses:
        with torch.no_grad():
            model(X)
        model.eval()(X)
    assert losses == []


def test_inner_blocks_keep_theirs():
    model = layer()
    with attention_losses() as outer:
        with attention_losses() as inner:
            model(X)
        model(X)
    assert (len(inner), len(outer)) == (1, 1)


def test_recomputation_adds_nothing_and_changes_no_gradient():
    gradients = []
    for run in (lambda m: m(X), lambda m: checkpoint(m, X, use_reentrant=False)):
        model = layer(commitment=1.0)
        with attention_losses() as losses:
            out = run(model)
        (term,) = losses
        (out.square().sum() + term.sum / term.count).backward()
        assert len(losses) == 1
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_terms_are_the_sum_over_layers_of_the_means():
    terms = together([LossTerm(torch.tensor(total), torch.tensor(3), 0.5) for total in (6.0, 3.0)])
    assert list(terms) == ["attention"]
    term = terms["attention"]
    assert float(term.sum / term.count) == pytest.approx(6 / 3 + 3 / 3)
    assert term.weight == 0.5
    assert together([]) == {}
    assert len(together([LossTerm(torch.tensor(1.0), torch.tensor(1), w) for w in (1.0, 2.0)])) == 2


def test_the_objective_of_a_model_holds_them(tiny_spec):
    routing = {"kind": "routing", "clusters": 2, "commitment": 0.1}
    batch = pair_batch([([10, 11, 12], [20, 21]), ([13], [22])])
    for kind, place in (("autoregressive", "encoder_attention"), ("ctc", "refiner_attention")):
        model = tiny_spec(kind, encoder_layers=2, **{place: [routing]}).model.build(60).train()
        assert model(batch, torch.Generator()).keys() - model.loss(batch, torch.Generator()).keys() == {"attention"}
        assert "attention" not in model.eval()(batch, torch.Generator())
