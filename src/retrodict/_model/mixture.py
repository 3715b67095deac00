"""Mixtures of Gaussian laws, with differentiable draws in any dimension."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr
from jaxtyping import Array, Float

from retrodict._arrays import PRNGKey, Scalar, as_real_array, check_finite, known_values
from retrodict._model.gaussian import LOG_2PI, Gaussian
from retrodict._model.parameters import check_lower
from retrodict._numerics import linalg


class GaussianMixture(eqx.Module):
    """The law Σ_j π_j N(m_j, s_j s_jᵀ) on R^d.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> law = rd.GaussianMixture(
        ...     jnp.log(jnp.array([0.25, 0.75])), jnp.array([[-1.0], [1.0]]), jnp.ones((2, 1, 1))
        ... )
        >>> float(law.mean[0])
        0.5

    Args:
        log_weights: log π, of shape `(component,)`, normalised.
        means: m, of shape `(component, d)`.
        scale_trils: lower Cholesky factors s, of shape `(component, d, d)`.
    """

    log_weights: Float[Array, "*batch component"] = eqx.field(
        converter=lambda value: as_real_array(value, "log_weights")
    )
    means: Float[Array, "*batch component d"] = eqx.field(
        converter=lambda value: as_real_array(value, "means")
    )
    scale_trils: Float[Array, "*batch component d d"] = eqx.field(
        converter=lambda value: as_real_array(value, "scale_trils")
    )

    def __check_init__(self) -> None:
        leaves = (self.log_weights, self.means, self.scale_trils)
        weights, means, scales = (getattr(leaf, "shape", None) for leaf in leaves)
        if weights is None or means is None or scales is None:
            return
        if not weights or means[:-1] != weights or scales != (*means, means[-1]):
            raise ValueError(
                "GaussianMixture expects log_weights of shape (component,), means of shape"
                " (component, d) and scale_trils of shape (component, d, d), got"
                f" {weights}, {means} and {scales}."
            )
        check_lower("scale_trils", self.scale_trils)
        check_finite(self.means, "means")
        check_finite(self.scale_trils, "scale_trils")
        known = known_values(self.log_weights)
        if known is None:
            return
        totals = np.exp(known.astype(float)).sum(axis=-1)
        if not np.all(np.abs(totals - 1) <= 1e-3):  # NaN too
            raise ValueError(
                "GaussianMixture expects log_weights whose exponentials sum to 1, got a sum of"
                f" {totals}. Use jax.nn.log_softmax, or the logarithm of weights that sum to 1."
            )

    @property
    def dim(self) -> int:
        """The dimension d."""
        return self.means.shape[-1]

    @property
    def num_components(self) -> int:
        """The number of components."""
        return self.means.shape[-2]

    @property
    def noise_dim(self) -> int:
        """The number of standard normal variates per draw; the first selects the component."""
        return self.dim + 1

    @property
    def mean(self) -> Float[Array, "*batch d"]:
        """The mean Σ_j π_j m_j."""
        return jnp.sum(jnp.exp(self.log_weights)[..., None] * self.means, axis=-2)

    @property
    def covariance(self) -> Float[Array, "*batch d d"]:
        """The covariance: the mean of the covariances, and the covariance of the means."""
        weights = jnp.exp(self.log_weights)[..., None, None]
        gram = jnp.vectorize(linalg.outer_gram, signature="(d,d)->(d,d)")
        shifts = self.means - self.mean[..., None, :]
        spread = shifts[..., :, None] * shifts[..., None, :]
        return jnp.sum(weights * (gram(jnp.tril(self.scale_trils)) + spread), axis=-3)

    @property
    def std(self) -> Float[Array, "*batch d"]:
        """The standard deviation of each coordinate."""
        return jnp.sqrt(jnp.diagonal(self.covariance, axis1=-2, axis2=-1))

    @property
    def components(self) -> Gaussian:
        """The component laws, a `Gaussian` with a leading axis `component`."""
        return jax.vmap(Gaussian)(self.means, self.scale_trils)

    def log_prob(self, x: Float[Array, "d"]) -> Scalar:
        """Compute the log density log Σ_j π_j N(x; m_j, s_j s_jᵀ)."""
        terms = _terms(self, _residuals(self, x))
        return jax.nn.logsumexp(self.log_weights + jnp.sum(terms, axis=1))

    def sample(self, key: PRNGKey, sample_shape: tuple[int, ...] = ()) -> Float[Array, "*shape d"]:
        """Draw a component, then a state from that component."""
        noise = jax.random.normal(key, (*sample_shape, self.noise_dim), self.means.dtype)
        flat = jax.vmap(self.from_noise)(noise.reshape(-1, self.noise_dim))
        return flat.reshape(*sample_shape, self.dim)

    def from_noise(self, noise: Float[Array, "noise"]) -> Float[Array, "d"]:
        """Map standard normal noise to a draw; the first entry selects the component.

        The selection is discontinuous, but the law is smooth in its parameters. The derivative of a
        draw is an implicit reparameterisation gradient (Figurnov, Mohamed and Mnih, 2018). Let
        F_i(x_i | x_{<i}; θ) be the distribution function of each coordinate given the earlier ones.
        Holding F(x; θ) = u fixed as θ changes gives dx = −(∂F/∂x)⁻¹ (∂F/∂θ) dθ, with a triangular
        ∂F/∂x. The noise itself is not differentiated.
        """
        return _draw(self, noise)


@jax.custom_jvp
def _draw(law: GaussianMixture, noise: Array) -> Array:
    cumulative = jnp.cumsum(jnp.exp(law.log_weights))
    # Rounding may leave the last sum different from one, so the uniform variate is scaled by it.
    index = jnp.sum(cumulative[:-1] < ndtr(noise[0]) * cumulative[-1])
    selection = jax.nn.one_hot(index, law.num_components, dtype=law.means.dtype)
    mean = jnp.sum(selection[:, None] * law.means, axis=0)
    scale = jnp.sum(selection[:, None, None] * jnp.tril(law.scale_trils), axis=0)
    return mean + linalg.matvec(scale, noise[1:])


@_draw.defjvp
def _draw_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    law, noise = primals
    x = _draw(law, noise)
    _, tangent = jax.jvp(lambda law: _distribution(law, x), (law,), (tangents[0],))
    slope = jax.jacfwd(lambda x: _distribution(law, x))(x)
    return x, -linalg.solve_triangular(slope, tangent)


def _distribution(law: GaussianMixture, x: Float[Array, "d"]) -> Float[Array, "d"]:
    """Compute F_i(x_i | x_{<i}) for each coordinate, minus one where it exceeds one half.

    Given the earlier coordinates, coordinate i of component j is normal with standardised residual
    e_ji = (s_j⁻¹(x − m_j))_i. The weight of the component is proportional to π_j times its density
    of the earlier coordinates. Above one half the function returns −(1 − F), which has the same
    derivative and avoids cancellation.
    """
    residuals = _residuals(law, x)
    terms = _terms(law, residuals)
    # An exclusive cumulative sum. Subtracting each term from the inclusive sum would lose the other
    # terms to rounding for a component whose density is tiny there.
    earlier = jnp.cumsum(jnp.pad(terms[:, :-1], ((0, 0), (1, 0))), axis=1)
    weights = jax.nn.softmax(law.log_weights[:, None] + earlier, axis=0)
    upper = jnp.sum(weights * ndtr(residuals), axis=0) > 0.5
    sign = jnp.where(upper, -1.0, 1.0).astype(x.dtype)[None, :]
    return jnp.sum(weights * sign * ndtr(sign * residuals), axis=0)


def _residuals(law: GaussianMixture, x: Array) -> Float[Array, "component d"]:
    """Compute s_j⁻¹ (x − m_j) per component, with signs that make each entry increase in its x_i.

    The sign is flipped where the scale has a negative pivot.
    """
    scales = law.scale_trils
    signs = jnp.where(jnp.diagonal(scales, axis1=-2, axis2=-1) < 0, -1.0, 1.0)
    signs = signs.astype(scales.dtype)
    return jax.vmap(lambda m, s, t: t * linalg.solve_triangular(s, x - m))(law.means, scales, signs)


def _terms(law: GaussianMixture, residuals: Array) -> Float[Array, "component d"]:
    """Compute the log density of each coordinate given the earlier ones, per component."""
    diagonal = jnp.diagonal(law.scale_trils, axis1=-2, axis2=-1)
    return -0.5 * (residuals**2 + LOG_2PI) - jnp.log(jnp.abs(diagonal))
