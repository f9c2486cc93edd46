"""Concentration of routing by layer, against figures worked out by hand and against the usage figures of all layers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remoe_cli.report import plots
from remoe_cli.report.concentration import against_uniform, concentration, concentration_figures
from remoe_cli.report.locality import usage
from remoe_cli.routing import RoutingTrace


def trace_of(seed: int, n_experts: int = 12, top_k: int = 3, tokens: int = 40, layers: int = 2) -> RoutingTrace:
    rng = np.random.default_rng(seed)
    keys = rng.random((tokens, layers, n_experts)) ** np.linspace(0.2, 3, n_experts)
    experts = np.argsort(-keys, axis=-1)[..., :top_k]
    return RoutingTrace(experts.astype(np.int16), np.array([0, tokens]), np.zeros(tokens, dtype=bool), n_experts)


def test_by_hand():
    found = concentration(np.array([[4, 2, 1, 1], [2, 2, 2, 2]]))
    np.testing.assert_allclose(found.max_frequency, [0.5, 0.25])
    np.testing.assert_allclose(found.top_8_mass, [1, 1])
    nats = 0.5 * math.log(2) + 0.25 * math.log(4) + 2 * 0.125 * math.log(8)
    np.testing.assert_allclose(found.entropy, [nats / math.log(4), 1])
    np.testing.assert_allclose(found.effective_experts, [math.exp(nats), 4])
    np.testing.assert_allclose(against_uniform(np.array([[4, 2, 1, 1]])), [[2, 1, 0.5, 0.5]])


def test_the_eight_greatest():
    found = concentration(np.array([[10, *range(1, 11)]]))
    assert found.top_8_mass == pytest.approx((10 + 10 + 9 + 8 + 7 + 6 + 5 + 4) / 65)


@given(st.integers(0, 200))
def test_as_the_usage_of_all_layers(seed):
    trace = trace_of(seed)
    found, whole = concentration_figures(trace), usage(trace)
    assert found["effective_experts"] == pytest.approx(whole.effective_experts)
    assert found["entropy"] == pytest.approx(whole.entropy_layers)
    assert 1 / 12 <= found["max_frequency"] <= 1 / 3 and found["max_frequency"] <= found["top_8_mass"] <= 1
    for name, by_layer in found["layers"].items():
        assert found[name] == pytest.approx(np.mean(by_layer)) and len(by_layer) == 2


def test_nothing_used_and_a_single_expert():
    assert set(concentration(np.zeros((2, 4), dtype=np.int64))) == {None}
    assert set(concentration(np.array([[1, 1], [0, 0]]))) == {None}
    alone = concentration(np.array([[7]]))
    assert alone.entropy is None and alone.effective_experts == [1] and alone.max_frequency == [1]
    assert np.isnan(against_uniform(np.array([[1, 1], [0, 0]]))[1]).all()


def test_plots_are_whole_files(tmp_path):
    traces = {"base": trace_of(0), "tuned": trace_of(1)}
    plots.plot_usage({name: one.uses() for name, one in traces.items()}, tmp_path / "usage.png")
    plots.plot_layers({name: concentration_figures(one) for name, one in traces.items()}, tmp_path / "layers.png")
    for path in tmp_path.iterdir():
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert {path.name for path in tmp_path.iterdir()} == {"usage.png", "layers.png"}
