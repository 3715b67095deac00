"""The bounds for finite state spaces: against sums over all paths, and on hundreds of problems."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_models import linear_model
from nonlinear_models import nonlinear_emission_model

import retrodict as rd
from retrodict.bounds import finite
from retrodict.bounds.finite import FiniteBounds, FiniteProblem, finite_bounds

PERTURBATIONS = ("misspecified", "random", "one defect", "noisy", "nearly exact")
FUNCTIONALS = ("random", "adversarial", "state", "one time", "indicator", "constant sign")
KINDS = list(itertools.product(PERTURBATIONS, FUNCTIONALS))

# ---------------------------------------------------------------------------------------------
# Random problems, in numpy: one of each kind of approximation and functional, a few times over.
# ---------------------------------------------------------------------------------------------


def normalise(array):
    return array / array.sum(axis=-1, keepdims=True)


def reverse(prior, transitions, likelihoods):
    """Filtering laws and backward kernels [k, y, x] of one model."""
    laws, kernels = [normalise(prior * likelihoods[0])], []
    for m, g in zip(transitions, likelihoods[1:], strict=True):
        joint = laws[-1][:, None] * m * g[None, :]
        kernels.append(normalise(joint.T))
        laws.append(normalise(joint.sum(axis=0)))
    return np.stack(laws), np.stack(kernels)


def pairs(terminal, kernels):
    """Laws of neighbours [k, x, y] under a backward chain."""
    law, marginals = terminal, []
    for kernel in kernels[::-1]:
        marginals.append(law[None, :] * kernel.T)
        law = marginals[-1].sum(axis=1)
    return np.stack(marginals[::-1])


def approximation(rng, kind, model, scale):
    """Auxiliary laws and backward kernels that are wrong in one of five ways."""
    laws, kernels = reverse(*model)
    width = 10.0 ** (rng.uniform(-7, -4) if kind == "nearly exact" else rng.uniform(-2, 0))

    def noisy(array):
        return normalise(array * np.exp(width * rng.standard_normal(array.shape)))

    if kind == "misspecified":
        return reverse(*(noisy(part) for part in model))
    if kind == "random":
        return tuple(
            normalise(np.exp(scale * rng.standard_normal(a.shape))) for a in (laws, kernels)
        )
    if kind == "one defect":
        where = rng.integers(len(kernels))
        kernels[where] = noisy(kernels[where])
        return laws, kernels
    return noisy(laws), noisy(kernels)


def functional(rng, kind, difference):
    """Increments of one of six kinds; the adversarial one makes the errors of all pairs add up."""
    n, size, _ = difference.shape
    values = rng.standard_normal(difference.shape)
    if kind == "adversarial":
        return np.sign(difference)
    if kind == "state":
        return np.broadcast_to(values[:, :, :1], values.shape)
    if kind == "one time":
        return values * (np.arange(n) == rng.integers(n))[:, None, None]
    if kind == "indicator":
        chosen = np.eye(size)[rng.integers(size, size=n)]
        return np.broadcast_to(chosen[:, :, None], values.shape)
    return np.abs(values) if kind == "constant sign" else values


def fields(model, laws, kernels, h):
    prior, transitions, likelihoods = model
    return {
        "prior": prior,
        "transitions": transitions,
        "likelihoods": likelihoods,
        "kernels": kernels,
        "filters": laws,
        "functional": np.array(h),
    }


def random_model(rng, scale, n, size):
    def draw(*shape):
        return np.exp(scale * rng.standard_normal(shape))

    return normalise(draw(size)), normalise(draw(n - 1, size, size)), draw(n, size)


def random_fields(rng, kinds, n, size):
    scale = 10.0 ** rng.uniform(-2, 0.5)
    model = random_model(rng, scale, n, size)
    laws, kernels = approximation(rng, kinds[0], model, scale)
    exact_laws, exact_kernels = reverse(*model)
    difference = pairs(laws[-1], kernels) - pairs(exact_laws[-1], exact_kernels)
    return fields(model, laws, kernels, functional(rng, kinds[1], difference))


def targeted_fields(rng, n, size):
    """Strong mixing, one tilted backward kernel, into x_j, and f(x_j) filed one step earlier."""
    model = random_model(rng, 10.0 ** rng.uniform(-2.5, -1.5), n, size)
    laws, kernels = reverse(*model)
    truth, j = pairs(laws[-1], kernels), rng.integers(1, n - 1)
    tilt = np.exp(10.0 ** rng.uniform(-2, -0.7) * rng.standard_normal(size))
    kernels[j] = normalise(kernels[j] * tilt[None, :])
    difference = pairs(laws[-1], kernels) - truth
    h = np.zeros_like(difference)
    h[j - 1] = np.sign(difference[j].sum(axis=1))[None, :]
    return fields(model, laws, kernels, h)


@jax.jit
def evaluate(batch: dict[str, Any], measure: jax.Array) -> FiniteBounds:
    def one(arrays: dict[str, Any]) -> FiniteBounds:
        return finite_bounds(FiniteProblem.from_model(**arrays), measure=measure)

    return jax.vmap(one)(batch)


def together(problems: list[dict[str, Any]], measure: Any = None) -> FiniteBounds:
    # A measure that counts states rather than none at all: tests with one share what is compiled.
    batch = {name: np.stack([p[name] for p in problems]) for name in problems[0]}
    return evaluate(batch, jnp.ones_like(batch["prior"][0]) if measure is None else measure)


def one_by_one(problems: list[dict[str, Any]]) -> FiniteBounds:
    # Tests of this shape that need no batch share what is compiled.
    results = [finite_bounds(FiniteProblem.from_model(**problem)) for problem in problems]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *results)


@pytest.fixture(scope="module")
def random_bounds() -> dict[str, np.ndarray]:
    """Errors and bounds of 360 problems of two shapes."""
    results = []
    for rounds, shape, run in [(2, (2, 2), one_by_one), (10, (30, 7), together)]:
        rng = np.random.default_rng(shape)
        results.append(run([random_fields(rng, kinds, *shape) for kinds in KINDS * rounds]))
    names = [name for name in FiniteBounds._fields if name not in ("contributions", "quantities")]
    return {name: np.concatenate([getattr(r, name) for r in results]) for name in names}


def violated(bound, error):
    """Where a bound is broken by more than rounding; a NaN counts."""
    return ~(np.asarray(bound) >= np.abs(error) * (1 - 1e-9) - 1e-12)


# ---------------------------------------------------------------------------------------------
# Sums over all paths.
# ---------------------------------------------------------------------------------------------


def path_law(weights, n, size):
    """The law on all paths whose unnormalised probabilities are given by a function."""
    paths = list(itertools.product(range(size), repeat=n))
    law = np.array([weights(path) for path in paths])
    return paths, law / law.sum()


def law_at(paths, law, size, *times):
    """The law of the states at these times."""
    table = np.zeros((size,) * len(times))
    for path, probability in zip(paths, law, strict=True):
        table[tuple(path[t] for t in times)] += probability
    return table


def farthest_set(p, q):
    """TV as it is defined: the greatest difference of the probabilities of a set."""
    p, q = np.ravel(p), np.ravel(q)
    subsets = itertools.product((0.0, 1.0), repeat=len(p))
    return max(abs(np.dot(s, p) - np.dot(s, q)) for s in subsets)


@pytest.fixture(scope="module", params=[(2, 2), (4, 3)])
def small(request: pytest.FixtureRequest):
    n, size = request.param
    rng = np.random.default_rng(n * size)
    model = random_model(rng, 1.0, n, size)
    laws, kernels = (normalise(rng.uniform(0.1, 1.0, s)) for s in [(n, size), (n - 1, size, size)])
    arrays = fields(model, laws, kernels, rng.standard_normal((n - 1, size, size)))
    problem = FiniteProblem.from_model(**arrays)
    return arrays, problem, finite_bounds(problem)


def posterior_weight(arrays, path):
    value = arrays["prior"][path[0]] * arrays["likelihoods"][0, path[0]]
    for k, (x, y) in enumerate(itertools.pairwise(path)):
        value *= arrays["transitions"][k, x, y] * arrays["likelihoods"][k + 1, y]
    return value


def chain_weight(arrays, path, last=None):
    """The chain's probability of x_0, ..., x_m, with the terminal law or another one at m."""
    value = (arrays["filters"][-1] if last is None else last)[path[-1]]
    for k, (x, y) in enumerate(itertools.pairwise(path)):
        value *= arrays["kernels"][k, y, x]
    return value


def total(arrays, path):
    return sum(
        h[x, y] for h, (x, y) in zip(arrays["functional"], itertools.pairwise(path), strict=True)
    )


def test_error_and_identity_equal_sums_over_paths(small):
    arrays, problem, bounds = small
    n, size = arrays["filters"].shape
    paths, truth = path_law(lambda path: posterior_weight(arrays, path), n, size)
    _, ours = path_law(lambda path: chain_weight(arrays, path), n, size)
    h = np.array([total(arrays, path) for path in paths])
    np.testing.assert_allclose(bounds.error, (ours - truth) @ h, atol=1e-12)
    np.testing.assert_allclose(bounds.identity, (ours - truth) @ h, atol=1e-12)
    gap = np.sum(ours * np.log(ours / truth))
    np.testing.assert_allclose(bounds.quantities.evidence_gap, gap, rtol=1e-12)
    for k, term in enumerate(np.asarray(bounds.contributions.error)):
        difference = law_at(paths, ours - truth, size, k, k + 1)
        np.testing.assert_allclose(term, np.sum(difference * arrays["functional"][k]), atol=1e-12)
    np.testing.assert_array_equal(problem.terminal, arrays["filters"][-1])


def test_identity_terms_change_one_kernel_each(small):
    # The m-th intermediate law: past by the chain's kernels, future by the posterior's, x_m between
    # from t_m. Written as one weight a path: no conditional law is formed.
    arrays, _, bounds = small
    n, size = arrays["filters"].shape
    paths, truth = path_law(lambda path: posterior_weight(arrays, path), n, size)
    h = np.array([total(arrays, path) for path in paths])

    def future(path, m):
        steps = range(m, n - 1)
        m_g = arrays["transitions"], arrays["likelihoods"]
        return np.prod(
            [m_g[0][k, path[k], path[k + 1]] * m_g[1][k + 1, path[k + 1]] for k in steps]
        )

    before = truth @ h
    for m in range(n):
        law = arrays["filters"][m]
        _, between = path_law(
            lambda path, m=m, law=law: chain_weight(arrays, path[: m + 1], law) * future(path, m),
            n,
            size,
        )
        after = between @ h
        np.testing.assert_allclose(bounds.contributions.identity[m], after - before, atol=1e-12)
        before = after


def test_h1_constants_equal_suprema_over_sets(small):
    arrays, _, bounds = small
    h1 = np.asarray(bounds.quantities.h1)
    first = normalise(arrays["prior"] * arrays["likelihoods"][0])
    np.testing.assert_allclose(h1[0], 2 * farthest_set(arrays["filters"][0], first), atol=1e-12)
    for m in range(1, len(h1)):
        ours = arrays["filters"][m][None, :] * arrays["kernels"][m - 1].T
        moved = arrays["transitions"][m - 1] * arrays["likelihoods"][m][None, :]
        moved = arrays["filters"][m - 1][:, None] * moved
        np.testing.assert_allclose(h1[m], 2 * farthest_set(ours, moved / moved.sum()), atol=1e-12)


def test_kernel_coefficients_equal_suprema_and_cross_ratios(small):
    arrays, _, bounds = small
    size = arrays["filters"].shape[1]
    for k, kernel in enumerate(arrays["kernels"]):
        rows = itertools.product(kernel, repeat=2)
        delta = max(farthest_set(p, q) for p, q in rows)
        np.testing.assert_allclose(bounds.quantities.kernel_dobrushin[k], delta, atol=1e-12)
    for k, m in enumerate(arrays["transitions"]):
        cross = max(
            m[a, c] * m[b, d] / (m[b, c] * m[a, d])
            for a, b, c, d in itertools.product(range(size), repeat=4)
        )
        ratio = max(m[a, c] / m[b, c] for a, b, c in itertools.product(range(size), repeat=3))
        theta = np.tanh(np.log(cross) / 4)
        np.testing.assert_allclose(bounds.quantities.birkhoff[k], theta, rtol=1e-12)
        np.testing.assert_allclose(bounds.quantities.ratios[k], ratio, rtol=1e-12)
    assert np.all(bounds.quantities.forward_dobrushin <= bounds.quantities.birkhoff + 1e-12)
    assert np.all(bounds.quantities.tilted <= bounds.quantities.tilted_bound + 1e-12)


def test_theorem_2_and_printed_proposition_equal_double_sums(small):
    arrays, problem, bounds = small
    h1, h = np.asarray(bounds.quantities.h1), arrays["functional"]
    low, high = (float(sigma) for sigma in finite.mixing_constants(problem))
    assert low == pytest.approx(arrays["kernels"].min())
    ells = arrays["transitions"] * arrays["likelihoods"][1:, None, :]
    ratio = max(ell.max() / ell.min() for ell in ells)
    ratio = max(ratio, arrays["kernels"].max() / arrays["kernels"].min())
    assert high / low == pytest.approx(ratio)

    def double_sum(rho):
        value = 0.0
        for k in range(len(h)):
            inner = sum(rho ** (k - m) * h1[m] for m in range(k + 1)) + h1[k + 1]
            inner += sum(rho ** (m - k - 2) * h1[m] for m in range(k + 2, len(h1)))
            value += ratio / 2 * (h[k].max() - h[k].min()) * inner
        return value

    printed, rho = 0.0, 1 - 1 / ratio
    for k in range(len(h)):
        inner = h1[0] + sum(rho ** (k - m + 1) * h1[m] for m in range(1, k + 1)) + h1[k + 1]
        inner += sum(rho ** (m - k - 1) * h1[m] for m in range(k + 2, len(h1)))
        printed += 2 * ratio * np.abs(h[k]).max() * inner
    np.testing.assert_allclose(bounds.classical, double_sum(rho), rtol=1e-10)
    np.testing.assert_allclose(
        bounds.classical_birkhoff, double_sum((ratio - 1) / (ratio + 1)), rtol=1e-10
    )
    np.testing.assert_allclose(bounds.printed_proposition, printed, rtol=1e-10)
    display = 4 * ratio * (1 + rho / (1 - rho)) * h1.max() * np.abs(h).max() * len(h)
    np.testing.assert_allclose(bounds.final_display, display, rtol=1e-10)


# ---------------------------------------------------------------------------------------------
# Hundreds of problems.
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", finite.RIGOROUS)
def test_rigorous_finite_bounds_hold(name: str, random_bounds: dict[str, np.ndarray]):
    assert not np.any(violated(random_bounds[name], random_bounds["error"]))


def test_random_problems_have_errors_and_sharp_bounds(random_bounds: dict[str, np.ndarray]):
    assert len(random_bounds["error"]) == 360
    assert np.mean(np.abs(random_bounds["error"]) > 1e-9) > 0.9
    # Sharp enough that a factor of 2 lost somewhere would be seen.
    for name in ("s1", "s2", "s2_phi", "s2_q", "elbo_gap"):
        assert np.min(random_bounds[name] / np.maximum(np.abs(random_bounds["error"]), 1e-9)) < 1.2


def test_error_identity_holds_to_rounding(random_bounds: dict[str, np.ndarray]):
    np.testing.assert_allclose(
        random_bounds["identity"], random_bounds["error"], rtol=0, atol=1e-10
    )


def test_sharper_bounds_are_smaller(random_bounds: dict[str, np.ndarray]):
    for sharp, loose in [
        ("s1", "s2"),
        ("s2", "s3"),
        ("s3", "classical_birkhoff"),
        ("classical_birkhoff", "classical"),
        ("classical", "final_display"),
        ("elbo_gap", "elbo_gap_birkhoff"),
    ]:
        assert not np.any(violated(random_bounds[loose], random_bounds[sharp])), (sharp, loose)


def test_printed_proposition_fails_for_most_strongly_mixing_problems():
    rng = np.random.default_rng(0)
    # As many as the `found` of this shape, which are compiled already.
    bounds = together([targeted_fields(rng, 30, 7) for _ in range(300)])
    broken = violated(bounds.printed_proposition, bounds.error)
    rho = 1 - bounds.quantities.sigma_minus / bounds.quantities.sigma_plus
    assert np.mean(broken) > 0.8
    assert not np.any(broken & (rho >= 0.5))
    for name in finite.RIGOROUS:
        assert not np.any(violated(getattr(bounds, name), bounds.error)), name


@pytest.mark.parametrize("filed", [0, 1])
def test_counterexample_violates_printed_proposition(filed: int):
    bounds = finite_bounds(finite.two_state_counterexample(filed=filed))
    np.testing.assert_allclose(bounds.error, 0.1, rtol=1e-12)
    np.testing.assert_allclose(bounds.printed_proposition, 16 * 0.05**2 / 0.9, rtol=1e-12)
    np.testing.assert_allclose(bounds.error / bounds.printed_proposition, 9 / 4, rtol=1e-12)
    np.testing.assert_allclose(bounds.s2, 0.1, rtol=1e-12)
    for name in finite.RIGOROUS:
        assert not violated(getattr(bounds, name), bounds.error), name
    at_the_edge = finite_bounds(finite.two_state_counterexample(0.1, filed))
    np.testing.assert_allclose(at_the_edge.error, at_the_edge.printed_proposition, rtol=1e-12)


# ---------------------------------------------------------------------------------------------
# Cases that can be worked out by hand, and edges.
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1])
def test_error_of_wrong_initial_law_decays(k: int):
    # A symmetric chain that keeps its state with probability 0.7, and only the law of x_0 wrong:
    # S2 is exact, 0.4 · 0.4^(k+1), where the printed proposition does not fall with k at all.
    keep = np.array([[0.7, 0.3], [0.3, 0.7]])
    model = (np.full(2, 0.5), np.stack([keep, keep]), np.ones((3, 2)))
    laws, kernels = reverse(np.array([0.7, 0.3]), *model[1:])
    h = np.zeros((2, 2, 2))
    h[k] = np.array([1.0, -1.0])[None, :]
    bounds = finite_bounds(FiniteProblem.from_model(**fields(model, laws, kernels, h)))
    np.testing.assert_allclose(bounds.error, 0.4 ** (k + 2), rtol=1e-9)
    np.testing.assert_allclose(bounds.s2, 0.4 ** (k + 2), rtol=1e-9)


def test_lemma_3_is_sharp():
    m = jnp.array([[3.0, 1.0], [1.0, 3.0]])
    theta, ratio = finite.birkhoff(m)
    np.testing.assert_allclose(theta, (3 - 1) / (3 + 1), rtol=1e-12)
    np.testing.assert_allclose(theta, finite.dobrushin(m / 4), rtol=1e-12)
    np.testing.assert_allclose(ratio, 3.0, rtol=1e-12)


def test_lemma_2_is_sharp_and_accepts_infinite_ratios():
    p, q = jnp.array([0.3, 0.7, 0.0]), jnp.array([0.0, 0.7, 0.3])
    beta = jnp.array([5.0, 1.0, 5.0])
    tilted = finite.total_variation(normalise(p * beta), normalise(q * beta))
    bound = finite.tilted_distance(jnp.array([5.0, jnp.inf, jnp.inf]), jnp.array([0.3, 0.1, 0.0]))
    np.testing.assert_allclose(bound, [float(tilted), 1.0, 0.0], rtol=1e-12)


@pytest.fixture(scope="module")
def exact() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    model = random_model(rng, 1.0, 6, 4)
    return fields(model, *reverse(*model), rng.standard_normal((5, 4, 4)))


def test_bounds_of_exact_chain_are_zero(exact: dict[str, Any]):
    bounds = together([exact])
    for name in ("error", *finite.RIGOROUS):
        np.testing.assert_allclose(getattr(bounds, name), 0.0, atol=1e-7, err_msg=name)


def test_constant_functional_has_zero_error_and_bounds(exact: dict[str, Any]):
    wrong = np.full((5, 4, 4), 0.25)
    arrays = exact | {"kernels": wrong, "functional": np.ones((5, 4, 4))}
    bounds = together([arrays])
    for name in ("error", "identity", "s1", "s2", "s2_phi", "s2_q", "s3", "elbo_gap", "classical"):
        np.testing.assert_allclose(getattr(bounds, name), 0.0, atol=1e-12, err_msg=name)


def test_bounds_hold_with_zero_transition_probabilities(exact: dict[str, Any]):
    # A state that some states cannot reach: nothing is contracted for sure, and H2 fails.
    m = exact["transitions"].copy()
    m[:, 0, 1] = 0.0
    model = (exact["prior"], normalise(m), exact["likelihoods"])
    rng = np.random.default_rng(2)
    _, kernels = reverse(*model)
    support = normalise(kernels * np.exp(0.3 * rng.standard_normal(kernels.shape)))
    anywhere = normalise(np.exp(rng.standard_normal(kernels.shape)))
    for arrays in (support, anywhere):
        bounds = together([exact | {"transitions": model[1], "kernels": arrays}])
        np.testing.assert_allclose(bounds.identity, bounds.error, atol=1e-12)
        np.testing.assert_array_equal(bounds.quantities.birkhoff, 1.0)
        for name in finite.RIGOROUS:
            assert not np.any(violated(getattr(bounds, name), bounds.error)), name
        for name in ("classical", "classical_birkhoff", "final_display", "printed_proposition"):
            assert np.all(np.isposinf(getattr(bounds, name))), name
        assert np.all(np.isfinite(bounds.s3))
        # Paths that the model forbids have no finite divergence.
        assert bool(jnp.isinf(bounds.elbo_gap[0])) == (arrays is anywhere)


def test_bounds_are_infinite_for_laws_excluded_by_later_data(exact: dict[str, Any]):
    # State 0 cannot be followed by the last observation, and q̃_4 sits there.
    g = exact["likelihoods"].copy()
    g[5, 1:] = 0.0
    m = exact["transitions"].copy()
    m[4, 0] = [0.0, 0.5, 0.5, 0.0]
    filters = exact["filters"].copy()
    filters[4] = [1.0, 0.0, 0.0, 0.0]
    arrays = exact | {"likelihoods": g, "transitions": m, "filters": filters}
    bounds = together([arrays])
    np.testing.assert_allclose(bounds.identity, bounds.error, atol=1e-12)
    for name in finite.RIGOROUS:
        assert not np.any(violated(getattr(bounds, name), bounds.error)), name
    np.testing.assert_array_equal(bounds.quantities.tilted_bound[0, 4:], 1.0)


def test_classical_bound_gains_mixing_factor_for_one_state_increment(exact: dict[str, Any]):
    # Only c_5 is nonzero: one defect, in the terminal law. Both h_2 have the same oscillation.
    filters = exact["filters"].copy()
    filters[-1] = [0.1, 0.2, 0.3, 0.4]
    values, h = np.array([0.0, 1.0, -1.0, 0.5]), np.zeros((2, 5, 4, 4))
    h[0, 2], h[1, 2] = values[:, None], values[None, :]
    first, second = (together([exact | {"filters": filters, "functional": one}]) for one in h)
    rho = 1 - first.quantities.sigma_minus / first.quantities.sigma_plus
    np.testing.assert_allclose(first.classical, rho * second.classical, rtol=1e-9)
    for bounds in (first, second):
        for name in finite.RIGOROUS:
            assert not np.any(violated(getattr(bounds, name), bounds.error)), name


def test_reference_measure_affects_classical_bounds_up_to_scale(
    exact: dict[str, Any],
):
    measure = jnp.array([1.0, 2.0, 0.5, 1.0])
    wrong = [exact | {"kernels": np.full((5, 4, 4), 0.25)}]
    base, ours, scaled = (together(wrong, each) for each in (None, measure, 3 * measure))
    np.testing.assert_allclose(ours.classical, scaled.classical, rtol=1e-9)
    assert float(ours.final_display[0]) != pytest.approx(float(base.final_display[0]))
    np.testing.assert_array_equal(ours.s3, base.s3)


def test_finite_bounds_in_float32_survive_tiny_potentials(x32: None):
    arrays = random_fields(np.random.default_rng(3), ("noisy", "state"), 300, 3)
    laws, kernels = reverse(arrays["prior"], arrays["transitions"], arrays["likelihoods"])
    exact = pairs(laws[-1], kernels)
    difference = pairs(arrays["filters"][-1], arrays["kernels"]) - exact
    error = np.sum(difference * arrays["functional"])
    arrays["likelihoods"] = arrays["likelihoods"] * 1e-20
    arrays = {name: np.asarray(value, np.float32) for name, value in arrays.items()}
    bounds = finite_bounds(FiniteProblem.from_model(**arrays))
    np.testing.assert_allclose(bounds.error, error, atol=1e-3 * abs(error))
    np.testing.assert_allclose(bounds.identity, error, atol=1e-2 * abs(error))
    for name in finite.RIGOROUS:
        value = getattr(bounds, name)
        assert value.dtype == jnp.float32
        assert float(value) >= abs(error)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("filters", lambda a: a[:1], r"n ≥ 2 times, got \(1, 4\)"),
        ("filters", lambda a: a[None], r"build them under jax.vmap"),
        ("filters", lambda a: 2 * a, r"Rows of filters must sum to 1, got a sum of 2"),
        ("kernels", lambda a: a[:-1], r"kernels must have shape \(n-1, S, S\) = \(5, 4, 4\)"),
        ("kernels", lambda a: np.swapaxes(a, 1, 2), r"Rows of kernels must sum to 1"),
        ("functional", lambda a: a[:, 0], r"functional must have shape .* got \(5, 4\)"),
        ("functional", lambda a: a * np.nan, r"functional must be finite"),
        ("transitions", lambda a: -a, r"transitions must not be negative"),
        ("potentials", lambda a: 0 * a, r"potentials must not be zero everywhere"),
        ("initial", lambda a: 0 * a, r"initial must not be zero everywhere"),
        ("initial", lambda a: a[:2], r"initial must have shape \(S,\) = \(4,\)"),
    ],
)
def test_finite_problem_refuses_bad_arrays(
    exact: dict[str, Any], name: str, change: Any, message: str
):
    problem = FiniteProblem.from_model(**exact)
    names = ("initial", "potentials", "transitions", "kernels", "filters", "functional")
    arrays = {field: np.asarray(getattr(problem, field)) for field in names}
    with pytest.raises(ValueError, match=message):
        FiniteProblem(**(arrays | {name: change(arrays[name])}))


def test_finite_problem_refuses_bad_models_and_options(exact: dict[str, Any]):
    with pytest.raises(ValueError, match=r"likelihoods shape \(n, S\), got \(4,\) and \(6, 3\)"):
        FiniteProblem.from_model(**(exact | {"likelihoods": exact["likelihoods"][:, :3]}))
    with pytest.raises(
        ValueError, match=r"transitions must have shape \(n-1, S, S\) = \(5, 4, 4\)"
    ):
        FiniteProblem.from_model(**(exact | {"transitions": exact["transitions"][:2]}))
    problem = FiniteProblem.from_model(**exact)
    with pytest.raises(ValueError, match=r"measure must have shape \(S,\) = \(4,\), got \(3,\)"):
        finite_bounds(problem, measure=jnp.ones(3))
    with pytest.raises(ValueError, match="measure must be positive"):
        finite.mixing_constants(problem, jnp.array([1.0, 0.0, 1.0, 1.0]))
    with pytest.raises(ValueError, match="between 0 and ½, got 0.5"):
        finite.two_state_counterexample(0.5)
    with pytest.raises(ValueError, match="filed must be 0"):
        finite.two_state_counterexample(filed=2)


# ---------------------------------------------------------------------------------------------
# From a grid.
# ---------------------------------------------------------------------------------------------

TANH = nonlinear_emission_model(jnp.tanh, 0.5, weight=0.5)
PAIRS = rd.AdditiveFunctional(
    lambda before, x, weight: weight * before[0] * x[0] + x[0] ** 2,
    lambda x, weight: weight * x[0],
    quadratic=True,
)
WEIGHTS = np.array([1.0, -0.5, 0.7, 0.2, -1.0, 0.4])


@pytest.fixture(scope="module")
def smoothed() -> tuple[jax.Array, rd.LinearGaussianChain]:
    """A series of six rows, the third missing, and what the extended smoother makes of it."""
    ys = jnp.array([[1.6], [0.8], [jnp.nan], [1.0], [-0.1], [-1.2]])
    return ys, rd.extended_smoother(TANH, ys).chain


def on_box(smoothed: Any, width: float) -> tuple[rd.Grid, FiniteProblem, FiniteBounds]:
    ys, chain = smoothed
    grid = rd.Grid([-width], [width], 120)
    problem = FiniteProblem.from_grid(TANH, chain, ys, grid, PAIRS, WEIGHTS)
    return grid, problem, finite_bounds(problem, measure=jnp.exp(grid.log_quadrature))


@pytest.mark.slow
def test_finite_error_on_grid_equals_grid_smoother_error(smoothed: Any):
    # The box holds all mass, and for smooth densities the trapezoidal rule is exact to rounding: so
    # is the expectation in closed form under the chain, on the whole line, less the smoother's.
    ys, chain = smoothed
    grid, _, bounds = on_box(smoothed, 9.0)
    posterior = rd.grid_smoother(TANH, ys, grid)
    truth = jnp.sum(posterior.expectation_pairwise(PAIRS.increment, WEIGHTS))
    truth = truth + posterior.expectation(lambda x: PAIRS.initial(x, WEIGHTS[0]))[0]
    error = float(rd.expectation(chain, PAIRS, WEIGHTS) - truth)
    assert abs(error) > 1.0
    np.testing.assert_allclose(bounds.error, error, rtol=1e-10)
    np.testing.assert_allclose(bounds.identity, error, rtol=1e-10)
    for name in finite.RIGOROUS:
        assert not violated(getattr(bounds, name), error), name
    h1 = rd.bounds.h1_constants(TANH, chain, ys, grid=grid)
    np.testing.assert_allclose(bounds.quantities.h1, h1, atol=1e-12)


@pytest.mark.slow
def test_compact_domain_has_finite_mixing_bounds(smoothed: Any):
    # A box of two standard deviations: far from the line, but H2 holds there.
    ys, chain = smoothed
    grid, problem, bounds = on_box(smoothed, 2.0)
    for name in finite.RIGOROUS:
        assert not violated(getattr(bounds, name), bounds.error), name
        assert np.isfinite(getattr(bounds, name)), name
    np.testing.assert_allclose(jnp.sum(problem.transitions, axis=2), 1.0, rtol=1e-12)
    rho = 1 - bounds.quantities.sigma_minus / bounds.quantities.sigma_plus
    assert float(rho) < 1
    assert np.all(bounds.quantities.birkhoff < 1)
    # The least density is one of a backward kernel, at a corner; its row gains what left the box.
    outside = rd.bounds.h2_constants(TANH, chain, grid).sigma_minus
    ratio = float(bounds.quantities.sigma_minus / outside)
    assert 1.0 <= ratio < 1.5


@pytest.mark.slow
def test_two_dimensional_grid_handles_inputs_and_missing_entries():
    eye = jnp.eye(2)
    model = linear_model(2, mean=1.0, weight=0.5, error=0.5, input_weight=eye[:, :1])
    inputs, ys = jnp.array([[0.0], [1.0], [-2.0]]), jnp.array([[1.0, 2], [jnp.nan, 0], [-1, 1]])
    gains = jnp.stack([0.3 * eye, 0.2 * eye])
    chain = rd.LinearGaussianChain.from_arrays(
        jnp.eye(3, 2), jnp.stack([eye] * 3), gains, jnp.eye(2), 2 * gains
    )
    grid = rd.Grid([-3.0, -2.0], [3.0, 2.0], (9, 8))
    problem = FiniteProblem.from_grid(model, chain, ys, grid, rd.LogJoint(model), inputs=inputs)
    points, quadrature = np.asarray(grid.points), np.exp(grid.log_quadrature)

    def bell(mean: Any, std: float) -> np.ndarray:
        return np.exp(-0.5 * np.sum((points - mean) ** 2, axis=1) / std**2)

    x, y = points[7], points[30]
    for table, density in [
        (normalise(problem.initial), bell(1.0, 1.0) * bell(np.asarray(ys[0]), 0.5)),
        (problem.transitions[1, 7], bell(0.5 * x + np.array([-2.0, 0.0]), 1.0)),
        (problem.kernels[1, 7], bell(0.2 * x + np.array([0.0, 1.0]), 0.4)),
        (problem.terminal, bell(0.0, 1.0)),
    ]:
        np.testing.assert_allclose(table, normalise(density * quadrature), rtol=1e-10)
    likelihood = np.exp(-2.0 * points[:, 1] ** 2)
    table = problem.potentials[0, 7] / problem.transitions[0, 7]
    np.testing.assert_allclose(table, likelihood / likelihood.max(), rtol=1e-10)

    def log_normal(value: Any, mean: Any, std: float) -> float:
        scaled = (np.asarray(value) - np.asarray(mean)) / std
        return np.sum(-0.5 * scaled**2 - np.log(std) - 0.5 * np.log(2 * np.pi))

    start = log_normal(x, 1.0, 1.0) + log_normal(ys[0], x, 0.5) + log_normal(0.0, y[1], 0.5)
    start += log_normal(y, 0.5 * x + np.array([1.0, 0.0]), 1.0)
    np.testing.assert_allclose(problem.functional[0, 7, 30], start, rtol=1e-10)
    later = log_normal(ys[2], y, 0.5) + log_normal(y, 0.5 * x + np.array([-2.0, 0.0]), 1.0)
    np.testing.assert_allclose(problem.functional[1, 7, 30], later, rtol=1e-10)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"grid": rd.Grid([-9.0], [9.0], 700)}, ValueError, r"600 points .* got 700 points"),
        ({"grid": rd.Grid([-9.0] * 2, [9.0] * 2, 9)}, ValueError, "The grid has 2 dimensions"),
        ({"grid": rd.Grid([90.0], [99.0], 120)}, ValueError, "no mass of a law of the transition"),
        ({"grid": 120}, TypeError, "Grid"),
        ({"chain": None}, TypeError, "LinearGaussianChain"),
        ({"ys": np.ones((5, 1))}, ValueError, "6, got 5"),
        ({"functional": rd.SecondMoments()}, ValueError, r"one number, got arrays of shapes \["),
        ({"data": WEIGHTS[:4]}, ValueError, r"6 rows, got an array of shape \(4,\)"),
    ],
)
def test_from_grid_refuses_bad_arguments(
    smoothed: Any, change: dict[str, Any], error: type[Exception], message: str
):
    arrays = {"chain": smoothed[1], "ys": smoothed[0], "grid": rd.Grid([-9.0], [9.0], 40)}
    arrays |= {"functional": PAIRS, "data": WEIGHTS}
    with pytest.raises(error, match=message):
        FiniteProblem.from_grid(TANH, **(arrays | change))


def test_from_grid_refuses_long_series_and_padding():
    n, grid = 600, rd.Grid([-9.0], [9.0], 600)
    ones = jnp.ones((n, 1, 1))
    chain = rd.LinearGaussianChain.from_arrays(ones[:, 0], ones, ones[1:], ones[1:, 0], ones[1:])
    with pytest.raises(ValueError, match=r"2e\+07 entries, got 600 points and 600 · 600²"):
        FiniteProblem.from_grid(TANH, chain, np.ones((n, 1)), grid, rd.StateSum())
    padded = rd.LinearGaussianChain(chain.laws, chain.kernels, jnp.asarray(n - 1))
    with pytest.raises(ValueError, match="without padding"):
        FiniteProblem.from_grid(TANH, padded, np.ones((n, 1)), grid, rd.StateSum())
